//! A hub on a loopback address, which misbehaves as a test says.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use serde_json::{Value, json};
use sha1::Sha1;
use sha2::{Digest, Sha256};

/// The commit of every repository.
pub(crate) const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

/// A request that the server has received.
#[derive(Clone, Debug)]
pub(crate) struct Received {
    /// The path and the query.
    pub(crate) path: String,
    headers: Vec<(String, String)>,
}

impl Received {
    /// Returns the value of a header, whose name is in small letters.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        let header = self.headers.iter().find(|(own, _)| own == name);
        header.map(|(_, value)| value.as_str())
    }

    /// Returns the first byte that the request asks for.
    fn first_byte(&self) -> usize {
        let range = self.header("range").unwrap_or("bytes=0-");
        let first = range.strip_prefix("bytes=").unwrap().strip_suffix('-');
        first.unwrap().parse().unwrap()
    }
}

/// An answer, which may end early.
#[derive(Clone, Debug, Default)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
    /// The number of bytes of the body after which the connection ends.
    pub(crate) cut: Option<usize>,
}

impl Answer {
    pub(crate) fn status(status: u16) -> Answer {
        Answer {
            status,
            ..Answer::default()
        }
    }

    pub(crate) fn redirect(location: String) -> Answer {
        Answer {
            status: 302,
            headers: vec![("location", location)],
            ..Answer::default()
        }
    }

    fn send(&self, mut to: TcpStream) {
        let (status, length) = (self.status, self.body.len());
        let mut head = format!("HTTP/1.1 {status} -\r\ncontent-length: {length}\r\n");
        for (name, value) in &self.headers {
            head += &format!("{name}: {value}\r\n");
        }
        head += "connection: close\r\n\r\n";
        let body = &self.body[..self.cut.unwrap_or(length)];
        // A client that has seen enough closes the connection.
        drop(
            to.write_all(head.as_bytes())
                .and_then(|()| to.write_all(body)),
        );
    }
}

/// The files of a repository.
#[derive(Clone, Default)]
pub(crate) struct Repository {
    files: Vec<(String, Vec<u8>)>,
}

impl Repository {
    pub(crate) fn new(files: &[(&str, &[u8])]) -> Repository {
        let own = |(path, bytes): &(&str, &[u8])| ((*path).to_owned(), bytes.to_vec());
        Repository {
            files: files.iter().map(own).collect(),
        }
    }

    /// Answers as the hub does. Text is in git, and everything else in large file storage.
    pub(crate) fn answer(&self, request: &Received) -> Answer {
        if request
            .path
            .starts_with("/api/models/owner/model/revision/main?")
        {
            return Answer {
                status: 200,
                body: self.listing().to_string().into_bytes(),
                ..Answer::default()
            };
        }
        let prefix = format!("/owner/model/resolve/{COMMIT}/");
        let path = request.path.strip_prefix(&prefix).unwrap_or_default();
        let Some((_, bytes)) = self.files.iter().find(|(own, _)| own == path) else {
            return Answer::status(404);
        };
        content(bytes, request)
    }

    fn listing(&self) -> Value {
        let files = self.files.iter().map(|(path, bytes)| {
            let mut file =
                json!({"rfilename": path, "size": bytes.len(), "blobId": git_hash(bytes)});
            if !path.ends_with(".json") {
                file["lfs"] = json!({"sha256": sha256(bytes), "size": bytes.len()});
            }
            file
        });
        json!({"id": "owner/model", "sha": COMMIT, "siblings": files.collect::<Vec<_>>()})
    }
}

/// Returns the part of a file that a request asks for.
pub(crate) fn content(bytes: &[u8], request: &Received) -> Answer {
    let (first, all) = (request.first_byte(), bytes.len());
    let range = ("content-range", format!("bytes {first}-{}/{all}", all - 1));
    Answer {
        status: if first > 0 { 206 } else { 200 },
        headers: if first > 0 { vec![range] } else { Vec::new() },
        body: bytes[first..].to_vec(),
        cut: None,
    }
}

pub(crate) fn sha256(bytes: &[u8]) -> String {
    digits(&Sha256::digest(bytes))
}

pub(crate) fn git_hash(bytes: &[u8]) -> String {
    let head = format!("blob {}\0", bytes.len());
    digits(&Sha1::digest([head.as_bytes(), bytes].concat()))
}

fn digits(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A server on a free port. Its threads end with the process.
pub(crate) struct HubServer {
    pub(crate) url: String,
    received: Arc<Mutex<Vec<Received>>>,
}

impl HubServer {
    /// Starts a server that has `repository`.
    pub(crate) fn of(repository: Repository) -> HubServer {
        HubServer::start(move |request, _| repository.answer(request))
    }

    /// Starts a server. `answer` gets a request, and how many others had the same path before.
    pub(crate) fn start(
        answer: impl Fn(&Received, usize) -> Answer + Send + Sync + 'static,
    ) -> HubServer {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let received = Arc::new(Mutex::new(Vec::<Received>::new()));
        let seen = Arc::clone(&received);
        thread::spawn(move || {
            for connection in listener.incoming() {
                let connection = connection.unwrap();
                let Some(request) = read_head(&connection) else {
                    continue;
                };
                let before = {
                    let mut seen = seen.lock().unwrap();
                    let before = seen.iter().filter(|other| other.path == request.path);
                    let before = before.count();
                    seen.push(request.clone());
                    before
                };
                answer(&request, before).send(connection);
            }
        });
        HubServer { url, received }
    }

    pub(crate) fn received(&self) -> Vec<Received> {
        self.received.lock().unwrap().clone()
    }

    /// Returns the requests for the content of files.
    pub(crate) fn downloads(&self) -> Vec<Received> {
        let mut received = self.received();
        received.retain(|request| !request.path.starts_with("/api/"));
        received
    }
}

fn read_head(connection: &TcpStream) -> Option<Received> {
    let mut lines = BufReader::new(connection).lines();
    let first = lines.next()?.ok()?;
    let path = first.split(' ').nth(1)?.to_owned();
    let headers = lines
        .map_while(|line| line.ok().filter(|line| !line.is_empty()))
        .filter_map(|line| {
            let (name, value) = line.split_once(':')?;
            Some((name.to_lowercase(), value.trim().to_owned()))
        });
    Some(Received {
        path,
        headers: headers.collect(),
    })
}
