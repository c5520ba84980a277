//! Stop strings and stop tokens: they end the answer, and the text does not contain them.

use serde_json::json;

use crate::harness::*;

#[tokio::test]
async fn a_stop_string_ends_the_text_and_is_not_part_of_it() {
    let server = Server::new();
    for stop in ["two", "e t", "o three, na", "👧!"] {
        let answer = server
            .complete(json!({"max_tokens": 300, "stop": ["never", stop]}))
            .await
            .ok();
        let choice = &answer["choices"][0];
        let text = choice["text"].as_str().unwrap();
        let full = server.script(
            answer["usage"]["prompt_tokens"].as_u64().unwrap() as usize,
            300,
        );
        assert_eq!(text, full.split(stop).next().unwrap(), "{stop}");
        assert_eq!(choice["finish_reason"], "stop");
        assert!(answer["usage"]["completion_tokens"].as_u64().unwrap() < 100);
        let events = server
            .complete(json!({"max_tokens": 300, "stop": stop, "stream": true}))
            .await
            .events();
        assert_eq!(streamed_text(&events), text);
        let kept = server
            .complete(json!({"max_tokens": 300, "stop": stop, "include_stop_str_in_output": true}))
            .await
            .ok();
        assert_eq!(kept["choices"][0]["text"], format!("{text}{stop}"));
    }
    server
        .until("all pages are free or cached", |server| {
            server.engine.status().running == 0
        })
        .await;
}

#[tokio::test]
async fn a_stop_token_is_not_part_of_the_text() {
    let server = Server::new();
    let end = json!({END_OF_TURN.to_string(): 100});
    let ended = server
        .chat(json!({"logit_bias": end, "return_token_ids": true}))
        .await
        .ok();
    let choice = &ended["choices"][0];
    assert_eq!(
        (&choice["message"]["content"], &choice["finish_reason"]),
        (&json!(""), &json!("stop"))
    );
    assert_eq!(choice["token_ids"], json!([END_OF_TURN]));
    assert_eq!(ended["usage"]["completion_tokens"], 1);

    let later = server
        .chat(json!({"logit_bias": end, "min_tokens": 5, "return_token_ids": true}))
        .await
        .ok();
    assert_eq!(later["usage"]["completion_tokens"], 6);
    assert_eq!(later["choices"][0]["finish_reason"], "stop");

    let ignored = json!({"logit_bias": end, "ignore_eos": true, "max_tokens": 3});
    let skipped = server.chat(ignored.clone()).await.ok();
    assert_eq!(skipped["choices"][0]["message"]["content"], "");
    assert_eq!(skipped["choices"][0]["finish_reason"], "length");
    let spelled = server
        .chat(merged(ignored, json!({"skip_special_tokens": false})))
        .await
        .ok();
    assert_eq!(
        spelled["choices"][0]["message"]["content"],
        "<|eot_id|><|eot_id|><|eot_id|>"
    );

    let own = server
        .complete(json!({"logit_bias": {"300": 100}, "stop_token_ids": [300, 20]}))
        .await
        .ok();
    assert_eq!(own["choices"][0]["finish_reason"], "stop");
    assert_eq!(own["choices"][0]["text"], "");
}
