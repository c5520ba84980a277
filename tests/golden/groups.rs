//! Models with a scale for each group of columns, beside the reference without any rounding of
//! activations: they were trained so.

use super::fixture::Prompt;
use super::steps::follow;
use super::{for_each_fixture, log_softmax};

/// The limit of the distance to plain float, in units of the distance of a reference whose
/// activations are rounded in the same groups.
const OF_THE_SAME_GROUPS: f64 = 1.15;

/// Prints how far plain float is, beside activations in groups of 32, as llama.cpp has them.
#[test]
fn groups_are_as_far_from_plain_float_as_those_of_the_reference() {
    let mut compared = 0;
    for_each_fixture(true, |fixture, kernels| {
        let distances = &fixture.expected.float_distances;
        let Some((group, same)) = distances.iter().find(|(group, _)| **group != 32) else {
            return Ok(());
        };
        compared += 1;
        let mut model = fixture.model(kernels);
        let vocab = model.config().vocab;
        let prompts: &[Prompt] = &fixture.expected.prompts;
        let (mut sum, mut count) = (0.0, 0.0);
        for (index, rows) in follow(&mut model, prompts).iter().enumerate() {
            let exact = fixture.tensor(&format!("prompt.{index}.float"));
            for (got, exact) in rows.iter().zip(exact.chunks(vocab)) {
                for (got, exact) in log_softmax(got).zip(log_softmax(exact)) {
                    sum += (got - exact).abs();
                    count += 1.0;
                }
            }
        }
        let distance = sum / count;
        println!(
            "{}: {distance:.4} from plain float; the reference {same:.4} in groups of {group}, \
             {:.4} in groups of 32",
            fixture.name, distances[&32]
        );
        (distance <= OF_THE_SAME_GROUPS * same)
            .then_some(())
            .ok_or(format!(
                "{distance:.4} from plain float, the reference {same:.4}"
            ))
    });
    assert!(compared > 0, "there are fixtures with groups");
}
