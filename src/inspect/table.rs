//! Writes a report for people: plain and aligned.

use std::fmt::Display;
use std::io::{self, Write};

use super::report::{ExpertsReport, InspectReport, WindowReport};
use crate::checkpoint::{CommittedAttention, MaskedBlocks};

/// The width of the names on the left.
const NAMES: usize = 14;

/// Writes `report` to `out`.
pub(super) fn write(report: &InspectReport, out: &mut impl Write) -> io::Result<()> {
    writeln!(out, "{}", printable(&report.path))?;
    let verdict = if report.served {
        "this server would serve it"
    } else {
        "refused"
    };
    line(out, "verdict", verdict)?;
    for why in &report.refusals {
        line(out, "refused", why)?;
    }
    for warning in &report.warnings {
        line(out, "warning", warning)?;
    }
    container(report, out)?;
    sizes(report, out)?;
    family(report, out)?;
    weights(report, out)?;
    text(report, out)?;
    tensors(report, out)
}

fn line(out: &mut impl Write, name: &str, value: impl Display) -> io::Result<()> {
    writeln!(out, "  {name:NAMES$}{}", printable(&value.to_string()))
}

/// Returns a text of a file without characters that control the terminal.
fn printable(text: &str) -> String {
    let escaped = |c: char| {
        if c.is_control() {
            c.escape_default().to_string()
        } else {
            c.to_string()
        }
    };
    text.chars().map(escaped).collect()
}

/// Writes a value if it is known.
fn optional(out: &mut impl Write, name: &str, value: Option<impl Display>) -> io::Result<()> {
    match value {
        Some(value) => line(out, name, value),
        None => line(out, name, "unknown"),
    }
}

fn container(report: &InspectReport, out: &mut impl Write) -> io::Result<()> {
    let name = match report.container {
        "huggingface" => "Hugging Face",
        "gguf" => "GGUF",
        "sglbitnt" => "SGLBITNT (.bin)",
        other => other,
    };
    match &report.container_detail {
        Some(detail) => line(out, "container", format_args!("{name}, {detail}"))?,
        None => line(out, "container", name)?,
    }
    if !report.files.is_empty() {
        line(out, "files", report.files.join(", "))?;
    }
    line(out, "bytes", thousands(report.bytes))
}

fn sizes(report: &InspectReport, out: &mut impl Write) -> io::Result<()> {
    let model = &report.model;
    optional(out, "architecture", model.architecture.as_ref())?;
    match (report.computes, report.pooling) {
        (Some("embeddings"), Some(pooling)) => {
            line(
                out,
                "computes",
                format_args!("embeddings, pooling: {pooling}"),
            )?;
        }
        (computes, _) => optional(out, "computes", computes)?,
    }
    line(out, "parameters", thousands(report.parameters))?;
    for (name, value) in [
        ("layers", model.layers),
        ("hidden", model.hidden),
        ("intermediate", model.intermediate),
        ("heads", model.heads),
        ("KV heads", model.kv_heads),
        ("head size", model.head_dim),
        ("vocabulary", model.vocabulary),
        ("context", model.context),
    ] {
        optional(out, name, value.map(thousands))?;
    }
    let tied = model.tied.map(|tied| if tied { "yes" } else { "no" });
    optional(out, "tied head", tied)
}

/// Writes what only some families have.
fn family(report: &InspectReport, out: &mut impl Write) -> io::Result<()> {
    if let Some(blocks) = report.masked_blocks {
        let MaskedBlocks {
            size, mask_token, ..
        } = blocks;
        let keys = match blocks.committed_attention {
            CommittedAttention::Causal => "causal",
            CommittedAttention::BlockCausal => "block-causal",
        };
        let size = size.map_or("unknown".to_owned(), |size| size.to_string());
        let token = mask_token.map_or("unknown".to_owned(), |token| token.to_string());
        let what = format_args!("of size {size}, mask token {token}, {keys} keys");
        line(out, "masked blocks", what)?;
    }
    if let Some(recurrent) = &report.recurrent {
        let (layers, others) = (recurrent.recurrent_layers, recurrent.attention_layers);
        let (keys, values) = (recurrent.key_heads, recurrent.value_heads);
        let (key_dim, value_dim) = (recurrent.key_dim, recurrent.value_dim);
        line(
            out,
            "recurrent",
            format_args!("{layers} layers, and {others} of attention"),
        )?;
        line(
            out,
            "states",
            format_args!(
                "{} bytes for each sequence ({keys} key heads, {values} value heads, {key_dim} x \
                 {value_dim})",
                thousands(recurrent.state_bytes as u64)
            ),
        )?;
    }
    mixtures_and_windows(report, out)?;
    if let Some(rotation) = &report.rotation {
        let (version, block, signs) = (rotation.version, rotation.block_size, rotation.sign_mode);
        let matrices = rotation.matrices;
        let embedding = if rotation.embedding {
            " and the embedding"
        } else {
            ""
        };
        line(
            out,
            "rotation",
            format_args!(
                "version {version}, blocks of {block}, {signs} signs, {matrices} \
                 matrices{embedding}"
            ),
        )?;
    }
    for part in &report.left_out {
        let (prefix, tensors) = (&part.prefix, part.tensors);
        line(out, "left out", format_args!("{tensors} tensors {prefix}*"))?;
    }
    Ok(())
}

fn mixtures_and_windows(report: &InspectReport, out: &mut impl Write) -> io::Result<()> {
    if let Some(experts) = &report.experts {
        let ExpertsReport {
            mixture_layers,
            dense_layers,
            count,
            used,
            intermediate,
            ..
        } = experts;
        let others = match dense_layers {
            0 => String::new(),
            dense => format!(", and {dense} dense layers"),
        };
        let what = format_args!(
            "{count} in each of {mixture_layers} layers, {used} for a token, {intermediate} \
             wide{others}"
        );
        line(out, "experts", what)?;
    }
    if let Some(WindowReport {
        local_layers,
        tokens,
    }) = &report.windows
    {
        let what = format_args!("of {tokens} tokens, in {local_layers} of the layers");
        line(out, "windows", what)?;
    }
    Ok(())
}

fn weights(report: &InspectReport, out: &mut impl Write) -> io::Result<()> {
    if let Some(codes) = report.codes {
        let total = codes.minus + codes.zero + codes.plus;
        for (name, count) in [("-1", codes.minus), ("0", codes.zero), ("1", codes.plus)] {
            let share = 100.0 * count as f64 / total as f64;
            let name = format!("weights {name}");
            line(
                out,
                &name,
                format_args!("{share:5.1} %  {}", thousands(count)),
            )?;
        }
    } else {
        line(out, "weights", "none are stored as ternary")?;
    }
    if let Some(scales) = &report.scales {
        let (min, median, max) = (scales.min, scales.median, scales.max);
        let value = format!("min {min:.6}, median {median:.6}, max {max:.6}");
        let count = thousands(scales.count);
        line(
            out,
            "scales",
            format_args!("{value} ({count}, one per {})", scales.per),
        )?;
    }
    Ok(())
}

fn text(report: &InspectReport, out: &mut impl Write) -> io::Result<()> {
    let stops = report.stops.iter().map(|stop| match &stop.text {
        Some(text) => format!("{} {text:?}", stop.id),
        None => stop.id.to_string(),
    });
    let mut stops = stops.collect::<Vec<String>>().join(", ");
    if report.stops.is_empty() {
        stops = "none".to_owned();
    }
    line(out, "stop tokens", stops)?;
    let Some(template) = &report.template else {
        return line(out, "chat template", "none");
    };
    line(
        out,
        "chat template",
        format_args!("from {}", template.source),
    )?;
    for text in &template.first_lines {
        line(out, "", format_args!("| {text}"))?;
    }
    Ok(())
}

fn tensors(report: &InspectReport, out: &mut impl Write) -> io::Result<()> {
    if report.tensors.is_empty() {
        return Ok(());
    }
    let header = [
        "tensors",
        "count",
        "shape",
        "layout",
        "told by",
        "type",
        "one scale per",
    ];
    let rows = report.tensors.iter().map(|kind| {
        let number = kind
            .type_number
            .map_or(String::new(), |number| number.to_string());
        let unknown = if kind.is_known { "" } else { " (unknown)" };
        [
            format!("{}{unknown}", printable(&kind.kind)),
            kind.count.to_string(),
            format!("{:?}", kind.shape),
            kind.layout.clone(),
            kind.told_by.to_owned(),
            number,
            kind.scale_per.clone().unwrap_or_default(),
        ]
    });
    let rows: Vec<[String; 7]> = [header.map(str::to_owned)]
        .into_iter()
        .chain(rows)
        .collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max();
    let widths: Vec<usize> = (0..header.len()).filter_map(width).collect();
    writeln!(out)?;
    for row in &rows {
        let cells = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:width$}"));
        let cells = cells.collect::<Vec<_>>().join("  ");
        writeln!(out, "  {}", cells.trim_end())?;
    }
    Ok(())
}

/// Writes a number with commas between thousands.
fn thousands(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{printable, thousands};

    #[test]
    fn texts_of_files_do_not_control_the_terminal() {
        assert_eq!(printable("ä\u{1b}[2J\n"), r"ä\u{1b}[2J\n");
    }

    #[test]
    fn commas_stand_between_thousands() {
        for (number, text) in [
            (0, "0"),
            (999, "999"),
            (1000, "1,000"),
            (1234567, "1,234,567"),
        ] {
            assert_eq!(thousands(number), text);
        }
    }
}
