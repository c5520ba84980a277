//! Tests of the chat client against a server that sends canned bytes.

use super::*;
use crate::drive::outcome::CompleteAnswer;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

const TEXT: &str = concat!(
    r#"data: {"choices":[{"index":0,"delta":{"content":"tern"},"finish_reason":null}]}"#,
    "\n\n"
);
const FINISH: &str = concat!(
    r#"data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}"#,
    "\n\n"
);
const USAGE: &str = concat!(
    r#"data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":2,"#,
    r#""total_tokens":11,"prompt_tokens_details":{"cached_tokens":4}}}"#,
    "\n\n"
);
const DONE: &str = "data: [DONE]\n\n";

/// Answers one connection with `body`, one byte at a time. Then closes the connection, or keeps it
/// open until the client closes it. Returns the outcome of one chat request.
async fn chat(
    status: &str,
    body: &str,
    keep_open: bool,
    disconnect: Option<Disconnect>,
) -> ChatOutcome {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/v1/", listener.local_addr().unwrap());
    let answer = format!(
        "HTTP/1.1 {status}\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n{body}"
    );
    let server = tokio::spawn(async move {
        let (mut socket, _) = listener.accept().await.unwrap();
        read_request(&mut socket).await;
        for byte in answer.into_bytes() {
            if socket.write_all(&[byte]).await.is_err() {
                return; // The client has disconnected already.
            }
        }
        if keep_open {
            let closed = socket.read(&mut [0; 16]).await;
            assert!(
                matches!(closed, Ok(0) | Err(_)),
                "the client should close the connection, not send more"
            );
        }
    });
    let options = ChatOptions {
        temperature: 0.0,
        ignore_eos: true,
        timeout: Duration::from_secs(30),
        slow_pause: Duration::ZERO,
    };
    let client = ChatClient::connect(&url, Some("m".into()), None, options)
        .await
        .unwrap();
    let request = ChatRequest {
        messages: vec![("system", "s".into()), ("user", "u".into())],
        max_tokens: 8,
        sampling_seed: 1,
        disconnect,
        is_slow: false,
        key: Some("k".into()),
    };
    let outcome = client.chat(&request, Instant::now()).await;
    server.await.unwrap();
    outcome
}

async fn read_request(socket: &mut tokio::net::TcpStream) {
    let mut request = Vec::new();
    loop {
        let mut bytes = [0; 1024];
        let count = socket.read(&mut bytes).await.unwrap();
        if count == 0 {
            return;
        }
        request.extend_from_slice(&bytes[..count]);
        let text = String::from_utf8_lossy(&request);
        if let Some((head, body)) = text.split_once("\r\n\r\n") {
            let length = head
                .lines()
                .find_map(|line| line.strip_prefix("content-length: "))
                .unwrap();
            if body.len() == length.parse::<usize>().unwrap() {
                assert!(head.starts_with("POST /v1/chat/completions "), "{head}");
                assert!(head.contains("\r\nauthorization: Bearer k\r\n"), "{head}");
                return;
            }
        }
    }
}

async fn failure(status: &str, body: &str) -> Failure {
    match chat(status, body, false, None).await {
        ChatOutcome::Failed(failure) => failure,
        outcome => panic!("{outcome:?}"),
    }
}

#[tokio::test]
async fn a_whole_stream_is_complete() {
    let body = [": keep-alive\n\n", TEXT, TEXT, FINISH, USAGE, DONE].concat();
    let outcome = chat("200 OK", &body, false, None).await;
    let ChatOutcome::Complete(CompleteAnswer {
        text,
        timing,
        usage,
    }) = outcome
    else {
        panic!("{outcome:?}")
    };
    assert_eq!(
        (
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.cached_tokens()
        ),
        (9, 2, 4)
    );
    assert_eq!(timing.gaps.len(), 1);
    assert_eq!(text, "terntern");
    assert!(timing.first_text.unwrap() <= timing.total);
}

#[tokio::test]
async fn a_broken_stream_is_never_complete() {
    assert_eq!(
        failure("200 OK", &[TEXT, FINISH, USAGE].concat()).await,
        Failure::CutOff
    );
    assert_eq!(
        failure("200 OK", &[TEXT, &DONE[..DONE.len() - 1]].concat()).await,
        Failure::CutOff
    );
    assert_eq!(
        failure("200 OK", &[TEXT, USAGE, DONE].concat()).await,
        Failure::Protocol("no finish_reason".into())
    );
    assert_eq!(
        failure("200 OK", &[TEXT, FINISH, DONE].concat()).await,
        Failure::Protocol("no usage".into())
    );
    let twice = [TEXT, FINISH, USAGE, DONE, DONE].concat();
    assert_eq!(
        failure("200 OK", &twice).await,
        Failure::Protocol("an event after [DONE]".into())
    );
    assert!(matches!(
        failure("200 OK", "data: {\n\n").await,
        Failure::Protocol(_)
    ));
}

#[tokio::test]
async fn errors_are_counted_by_their_code() {
    let error = concat!(
        r#"{"error":{"message":"full","type":"overloaded_error","#,
        r#""param":null,"code":"engine_overloaded"}}"#
    );
    let rejected = failure("503 Service Unavailable", error).await;
    assert_eq!(rejected, Failure::Status(503, "engine_overloaded".into()));
    let in_stream = failure("200 OK", &format!("{TEXT}data: {error}\n\n{DONE}")).await;
    assert_eq!(in_stream, Failure::InStream("engine_overloaded".into()));
    assert_eq!(
        failure("502 Bad Gateway", "<html>").await,
        Failure::Status(502, "<html>".into())
    );
}

#[tokio::test]
async fn a_client_that_disconnects_closes_its_connection() {
    let soon = Disconnect {
        after: Duration::from_millis(20),
        pieces: 8,
    };
    assert_eq!(
        chat("200 OK", TEXT, true, Some(soon)).await,
        ChatOutcome::Disconnected
    );
    let after_two = Disconnect {
        after: Duration::from_secs(20),
        pieces: 2,
    };
    assert_eq!(
        chat("200 OK", &[TEXT, TEXT].concat(), true, Some(after_two)).await,
        ChatOutcome::Disconnected
    );
}
