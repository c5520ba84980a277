//! Layers whose tokens attend to near tokens alone.

use std::fs;

use serde_json::Value;
use sterna::checkpoint::Source;
use sterna::model::{LoadOptions, Model};
use sterna_kernels::Kernels;

use super::fixture::fixtures;
use super::log_softmax;
use super::steps::follow;

/// The likeliest token alone does not tell a wrong window, so all log-probabilities are compared.
#[test]
fn a_window_changes_what_prompts_longer_than_it_compute_and_nothing_else() {
    let all = fixtures();
    let fixture = all.iter().find(|fixture| fixture.name == "maple-row");
    let fixture = fixture.expect("a fixture with a window");
    let computed = |window: Option<usize>| {
        let text = fs::read(fixture.checkpoint.join("config.json")).unwrap();
        let mut config: Value = serde_json::from_slice(&text).unwrap();
        if let Some(window) = window {
            config["sliding_window"] = window.into();
        }
        let weights = fs::read(fixture.checkpoint.join("model.safetensors")).unwrap();
        let source = Source::in_memory([
            ("config.json".to_owned(), config.to_string().into_bytes()),
            ("model.safetensors".to_owned(), weights),
        ]);
        let mut model = Model::load(&source, LoadOptions::new(Kernels::best(), 2)).unwrap();
        follow(&mut model, &fixture.expected.prompts)
    };
    let (windowed, full) = (computed(None), computed(Some(512)));
    assert!(
        computed(Some(usize::MAX)) == full,
        "no window is longer than the context"
    );
    let mut long_prompts = 0;
    for (index, prompt) in fixture.expected.prompts.iter().enumerate() {
        let continuation = prompt.continuation.len();
        if prompt.prompt.len() + continuation <= 40 {
            assert_eq!(windowed[index], full[index], "the window sees all tokens");
        } else if prompt.prompt.len() > 40 {
            long_prompts += 1;
            let pairs = windowed[index].iter().zip(&full[index]);
            let differences = pairs.flat_map(|(windowed, full)| {
                let pairs = log_softmax(windowed).zip(log_softmax(full));
                pairs
                    .map(|(windowed, full)| (windowed - full).abs())
                    .collect::<Vec<f64>>()
            });
            let worst = differences.fold(0.0, f64::max);
            let spread = fixture.expected.spread_worst;
            assert!(worst > 3.0 * spread, "{worst} of a spread of {spread}");
        }
    }
    assert!(long_prompts > 0, "a prompt is longer than the window");
}
