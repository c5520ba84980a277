//! A small HTTP client that shows what libraries hide: cut lines, missing ends, slow reading.

use std::io;
use std::net::SocketAddr;

use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpStream;

pub(crate) struct Connection {
    stream: BufReader<TcpStream>,
    body: BodyFrame,
}

/// The unread part of the current body.
enum BodyFrame {
    Length(usize),
    Chunked,
    Ended,
}

/// The head of an answer.
#[derive(Debug, Default)]
pub(crate) struct Head {
    pub(crate) status: u16,
    pub(crate) closes: bool,
    pub(crate) retry_after: bool,
}

impl Connection {
    pub(crate) async fn open(address: SocketAddr) -> io::Result<Connection> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Connection {
            stream: BufReader::new(stream),
            body: BodyFrame::Ended,
        })
    }

    /// Sends a POST of a JSON body.
    pub(crate) async fn post(&mut self, path: &str, key: &str, body: &str) -> io::Result<()> {
        let authorization = match key {
            "" => String::new(),
            key => format!("authorization: Bearer {key}\r\n"),
        };
        let request = format!(
            "POST {path} HTTP/1.1\r\nhost: localhost\r\n{authorization}content-type: \
             application/json\r\ncontent-length: {}\r\n\r\n{body}",
            body.len()
        );
        self.send(request.as_bytes()).await
    }

    pub(crate) async fn send(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.stream.get_mut().write_all(bytes).await
    }

    /// Reads the head of the next answer.
    pub(crate) async fn head(&mut self) -> io::Result<Head> {
        let mut head = Head::default();
        self.body = BodyFrame::Ended;
        let status = self.line().await?;
        let code = status.split(' ').nth(1).and_then(|code| code.parse().ok());
        head.status = code.ok_or_else(|| invalid(&status))?;
        loop {
            let line = self.line().await?.to_ascii_lowercase();
            let Some((name, value)) = line.split_once(": ") else {
                return Ok(head);
            };
            match (name, value) {
                ("content-length", length) => {
                    let length = length.parse().map_err(|_| invalid(length))?;
                    self.body = BodyFrame::Length(length);
                }
                ("transfer-encoding", "chunked") => self.body = BodyFrame::Chunked,
                ("connection", "close") => head.closes = true,
                ("retry-after", _) => head.retry_after = true,
                _ => {}
            }
        }
    }

    /// Reads the next piece of the body, or `None` at its end. A cut line is an error.
    pub(crate) async fn piece(&mut self) -> io::Result<Option<Vec<u8>>> {
        let (length, is_chunk) = match self.body {
            BodyFrame::Ended | BodyFrame::Length(0) => return Ok(None),
            BodyFrame::Length(length) => (length, false),
            BodyFrame::Chunked => {
                let line = self.line().await?;
                let length = usize::from_str_radix(&line, 16).map_err(|_| invalid(&line))?;
                (length, true)
            }
        };
        let mut piece = vec![0; length];
        self.stream.read_exact(&mut piece).await?;
        if is_chunk {
            self.line().await?;
        }
        if !is_chunk || length == 0 {
            self.body = BodyFrame::Ended;
        }
        Ok((length > 0).then_some(piece))
    }

    /// Reads the rest of the body.
    pub(crate) async fn rest(&mut self) -> io::Result<String> {
        let mut body = Vec::new();
        while let Some(piece) = self.piece().await? {
            body.extend(piece);
        }
        Ok(String::from_utf8_lossy(&body).into_owned())
    }

    async fn line(&mut self) -> io::Result<String> {
        let mut line = String::new();
        if self.stream.read_line(&mut line).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        line.truncate(line.trim_end().len());
        Ok(line)
    }
}

fn invalid(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// Returns status and body of `path`.
pub(crate) async fn get(connection: &mut Connection, path: &str) -> io::Result<(u16, String)> {
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n");
    connection.send(request.as_bytes()).await?;
    let head = connection.head().await?;
    Ok((head.status, connection.rest().await?))
}
