//! The template process: it knows the vocabulary, and each worker is a copy of it.
//!
//! The server starts the template with a hidden command of its own program, and sends it the
//! tokenizer. A fork of the template is a worker at once, and shares the memory of the vocabulary
//! with all others. A stock of programs was rejected: each would prepare and hold a vocabulary.
//!
//! The template alone sends signals to workers and waits for their ends. So a process id always
//! names the worker that the server means: the system gives the id to nobody else before.

use std::error::Error;
use std::fs::File;
use std::io::{self, IoSliceMut, Read, Write, stdin};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process;

use llguidance::ParserFactory;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use rustix::stdio::{dup2_stderr, dup2_stdin};

use super::frames::{self, SentVocabulary};
use super::worker;
use crate::text::Tokenizer;

/// What the server sends: one byte for the order and four for a process id.
pub(super) type WorkerOrder = [u8; 5];

/// Start a worker, with the two files that come along: its end of the connection to the server, and
/// where it writes errors. The reply is its process id, or 0 if the system starts no process.
pub(super) const FORK: u8 = 0;
/// Stop a worker for a while. There is no reply.
pub(super) const PAUSE: u8 = 1;
/// Let a stopped worker go on. There is no reply.
pub(super) const RESUME: u8 = 2;
/// End a worker, which may have ended already. The reply is the number of the signal that ended
/// it, or 0.
pub(super) const END: u8 = 3;

/// Runs the template until the server closes the connection, which is the standard input.
///
/// # Errors
/// If the server sends something else than it should.
pub fn run() -> Result<(), Box<dyn Error>> {
    #[cfg(target_os = "linux")]
    rustix::thread::set_name(c"sterna-grammar")?; // Else it has the name of a link.
    ignore_signals();
    let mut server = UnixStream::from(stdin().as_fd().try_clone_to_owned()?);
    let (vocabulary, json) = frames::receive::<SentVocabulary>(&server)?;
    let mut source = vocabulary.tokenizer;
    source.json = json;
    let factory = worker::factory(Tokenizer::load(source)?, &vocabulary.end_tokens);
    while let Some((order, files)) = next_order(&server)? {
        let [kind, id @ ..] = order;
        let id = Pid::from_raw(i32::from_le_bytes(id));
        match (kind, id, <[OwnedFd; 2]>::try_from(files)) {
            (FORK, _, Ok(files)) => {
                let id = match fork() {
                    Ok(None) => {
                        drop(server);
                        become_worker(files, factory);
                    }
                    Ok(Some(id)) => id.as_raw_nonzero().get(),
                    Err(_) => 0, // The workers that run go on.
                };
                server.write_all(&id.to_le_bytes())?;
            }
            (PAUSE, Some(id), _) => drop(kill_process(id, Signal::STOP)),
            (RESUME, Some(id), _) => drop(kill_process(id, Signal::CONT)),
            (END, Some(id), _) => server.write_all(&end(id).to_le_bytes())?,
            _ => return Err("an order is not valid".into()),
        }
    }
    Ok(())
}

/// Ignores the signals that end a server. A terminal and a service manager send them to all
/// processes of the server, which goes on for a while. The workers inherit this.
#[expect(unsafe_code, reason = "calls of the C library")]
fn ignore_signals() {
    for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGTERM] {
        // SAFETY: these signals are no errors of this program, and no handler is involved.
        unsafe { libc::signal(signal, libc::SIG_IGN) };
    }
}

/// Returns the next order with the files that come along, or `None` if the server has gone.
fn next_order(server: &UnixStream) -> io::Result<Option<(WorkerOrder, Vec<OwnedFd>)>> {
    let mut order = WorkerOrder::default();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let parts = &mut [IoSliceMut::new(&mut order)];
    let received = recvmsg(server, parts, &mut control, RecvFlags::CMSG_CLOEXEC)?.bytes;
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            files.extend(rights);
        }
    }
    if received == 0 {
        return Ok(None);
    }
    let mut server = server;
    server.read_exact(&mut order[received..])?;
    Ok(Some((order, files)))
}

/// Returns the id of the new process, or `None` in the new process.
#[expect(unsafe_code, reason = "a call of the C library")]
fn fork() -> io::Result<Option<Pid>> {
    // SAFETY: this process has one thread, so no lock is held in the copy. `run` is the whole
    // process, and nothing that `run` calls starts a thread.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        id => Ok(Pid::from_raw(id)),
    }
}

/// Works as a worker until the server closes the connection.
fn become_worker(files: [OwnedFd; 2], factory: ParserFactory) -> ! {
    let [server, errors] = files;
    // The standard input is the template's connection, which the server must see closed when the
    // template ends.
    let result = die_with_the_template()
        .and_then(|()| File::open("/dev/null"))
        .and_then(|nothing| Ok(dup2_stdin(nothing)?))
        .and_then(|()| Ok(dup2_stderr(errors)?))
        .and_then(|()| worker::run(UnixStream::from(server), factory));
    if let Err(error) = result {
        eprintln!("{error}");
        process::exit(1);
    }
    process::exit(0)
}

/// Lets the system end this process when the template ends. Elsewhere than on Linux, a worker ends
/// when the server closes the connection.
fn die_with_the_template() -> io::Result<()> {
    #[cfg(target_os = "linux")]
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    Ok(())
}

/// Ends a worker, and waits for the end. Returns the number of the signal that ended the worker,
/// or 0.
fn end(id: Pid) -> i32 {
    let _ = kill_process(id, Signal::KILL); // It may have ended already.
    let ended = waitpid(Some(id), WaitOptions::empty());
    let status = ended.ok().flatten().map(|(_, status)| status);
    status
        .and_then(|status| status.terminating_signal())
        .unwrap_or(0)
}
