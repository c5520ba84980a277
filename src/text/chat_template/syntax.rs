//! Rewrites what a template may say in Jinja and `minijinja` does not understand.
//!
//! - `{% generation %}`, a tag of `transformers`, marks answers for training. It writes what it
//!   contains, in a scope of its own, as `{% with %}` does.
//! - A loop over a text has no last character. The filter `EACH` makes a list of the characters.
//! - `%` between texts formats them. The filter `MODULO` does what the operator does.
//!
//! Everything else stays, byte for byte.

use std::ops::Range;

/// The filter that returns what a loop goes over.
pub(super) const EACH: &str = "__each";
/// The filter that does what the operator `%` does.
pub(super) const MODULO: &str = "__modulo";

/// Returns the template in the words of `minijinja`.
pub(super) fn adapted(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = next_tag(rest) {
        let (before, tag) = rest.split_at(start);
        out.push_str(before);
        let end = match &tag[..2] {
            "{#" => tag.find("#}").map(|end| end + 2),
            "{{" => expression_end(tag, "}}"),
            _ => raw_end(tag).or_else(|| expression_end(tag, "%}")),
        };
        // A tag without an end is an error of the template, which the compiler reports.
        let (tag, after) = tag.split_at(end.unwrap_or(tag.len()));
        if tag.starts_with("{#") || raw_end(tag).is_some() {
            out.push_str(tag);
        } else {
            out.push_str(&rewritten(tag));
        }
        rest = after;
    }
    out + rest
}

fn next_tag(text: &str) -> Option<usize> {
    let begins =
        |(at, _): &(usize, &str)| matches!(text.as_bytes().get(at + 1), Some(b'{' | b'%' | b'#'));
    text.match_indices('{').find(begins).map(|(at, _)| at)
}

/// Returns where a block of raw text ends that begins with this tag, if it is one.
fn raw_end(tag: &str) -> Option<usize> {
    let is_named = |tag: &str, name: &str| {
        let word = tag
            .strip_prefix("{%")
            .map(|tag| tag.trim_start_matches(['-', '+']).trim_start());
        let after = word.and_then(|word| word.strip_prefix(name));
        after.is_some_and(|after| {
            after
                .trim_start()
                .trim_start_matches(['-', '+'])
                .starts_with("%}")
        })
    };
    if !is_named(tag, "raw") {
        return None;
    }
    let mut ends = tag.match_indices("{%");
    let (end, _) = ends.find(|(at, _)| is_named(&tag[*at..], "endraw"))?;
    Some(end + tag[end..].find("%}")? + 2)
}

/// Returns where a tag ends that holds an expression.
fn expression_end(tag: &str, close: &str) -> Option<usize> {
    let mut depth = 0_usize;
    for token in tokens(tag, 2) {
        let text = &tag[token.clone()];
        match text {
            _ if depth == 0 && tag[token.start..].starts_with(close) => {
                return Some(token.start + close.len());
            }
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    None
}

/// Returns the places of the words, numbers, texts and signs of a tag, from a byte on.
fn tokens(tag: &str, from: usize) -> impl Iterator<Item = Range<usize>> + '_ {
    let mut at = from;
    std::iter::from_fn(move || {
        let rest = &tag[at..];
        at += rest.len() - rest.trim_start().len();
        let rest = &tag[at..];
        let first = rest.chars().next()?;
        let is_word = |char: char| char.is_alphanumeric() || char == '_';
        let length = match first {
            '\'' | '"' => text_length(rest, first),
            _ if is_word(first) => word_length(rest),
            _ => {
                let two = ["//", "**", "==", "!=", "<=", ">="];
                let is_pair = two.iter().any(|pair| rest.starts_with(pair));
                if is_pair { 2 } else { first.len_utf8() }
            }
        };
        let token = at..at + length;
        at += length;
        Some(token)
    })
}

/// Returns the length of a word or a number. The sign of an exponent is a part of its number.
fn word_length(text: &str) -> usize {
    let is_word = |char: char| char.is_alphanumeric() || char == '_';
    let length = |text: &str| text.find(|char| !is_word(char)).unwrap_or(text.len());
    let (word, rest) = text.split_at(length(text));
    let is_number = word.starts_with(|char: char| char.is_ascii_digit());
    let is_signed =
        rest.starts_with(['-', '+']) && rest[1..].starts_with(|c: char| c.is_ascii_digit());
    match is_number && word.ends_with(['e', 'E']) && is_signed {
        true => word.len() + 1 + length(&rest[1..]),
        false => word.len(),
    }
}

/// Returns the length of a text in quotation marks, which are part of it.
fn text_length(text: &str, quote: char) -> usize {
    let mut is_escaped = false;
    for (at, char) in text.char_indices().skip(1) {
        match char {
            _ if is_escaped => is_escaped = false,
            '\\' => is_escaped = true,
            _ if char == quote => return at + 1,
            _ => {}
        }
    }
    text.len()
}

/// Text that is put into a tag, in the place of other text.
struct SyntaxChange {
    place: Range<usize>,
    text: String,
}

fn rewritten(tag: &str) -> String {
    let tokens: Vec<Range<usize>> = tokens(tag, 2)
        .skip_while(|token| matches!(&tag[token.clone()], "-" | "+") && token.start == 2)
        .collect();
    let word = |index: usize| {
        tokens
            .get(index)
            .map_or("", |token: &Range<usize>| &tag[token.clone()])
    };
    let is_block = tag.starts_with("{%");
    let mut changes = Vec::new();
    if is_block && matches!(word(1), "%" | "-" | "+") {
        let name = match word(0) {
            "generation" => "with",
            "endgeneration" => "endwith",
            other => other,
        };
        changes.push(SyntaxChange {
            place: tokens[0].clone(),
            text: name.to_owned(),
        });
    }
    if is_block && word(0) == "for" {
        changes.extend(loop_changes(tag, &tokens));
    }
    let first = usize::from(is_block);
    let last = tokens.len().saturating_sub(if is_block { 2 } else { 0 });
    for index in first..last.max(first) {
        if word(index) == "%" {
            changes.extend(modulo_changes(tag, &tokens, index, first));
        }
    }
    changes.sort_by_key(|change| (change.place.start, change.place.end));
    let (mut out, mut end) = (String::new(), 0);
    for SyntaxChange { place, text } in changes {
        out.push_str(&tag[end..place.start]);
        out.push_str(&text);
        end = place.end;
    }
    out + &tag[end..]
}

/// Returns the changes that put what a loop goes over through the filter `EACH`.
fn loop_changes(tag: &str, tokens: &[Range<usize>]) -> Vec<SyntaxChange> {
    let mut depth = 0_usize;
    let (mut start, mut end) = (None, None);
    for (index, token) in tokens.iter().enumerate() {
        match &tag[token.clone()] {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.saturating_sub(1),
            "in" if depth == 0 && start.is_none() => start = Some(token.end),
            "if" | "recursive" | "%" | "-" | "+" if depth == 0 && start.is_some() => {
                let is_last = tag[token.start..].trim_start_matches(['-', '+']) == "%}";
                let is_word = matches!(&tag[token.clone()], "if" | "recursive");
                if is_last || is_word {
                    end = Some(tokens[index - 1].end);
                    break;
                }
            }
            _ => {}
        }
    }
    match (start, end) {
        (Some(start), Some(end)) if start < end => {
            vec![insertion(start, " ("), insertion(end, &format!(")|{EACH}"))]
        }
        _ => Vec::new(),
    }
}

fn insertion(at: usize, text: &str) -> SyntaxChange {
    SyntaxChange {
        place: at..at,
        text: text.to_owned(),
    }
}

/// Returns the changes that make a filter of the operator `%` at a place.
fn modulo_changes(
    tag: &str,
    tokens: &[Range<usize>],
    index: usize,
    first: usize,
) -> Vec<SyntaxChange> {
    let text = |index: usize| tokens.get(index).map_or("", |token| &tag[token.clone()]);
    // A sign behind an operator belongs to the number after it.
    let is_sign = |index: usize| index == first || is_operator(text(index - 1));
    let ends_operand = |index: usize| match text(index) {
        "-" | "+" => !is_sign(index),
        other => is_weaker(other),
    };
    let (mut start, mut depth) = (index, 0_usize);
    while start > first {
        match text(start - 1) {
            ")" | "]" | "}" => depth += 1,
            "(" | "[" | "{" if depth == 0 => break,
            "(" | "[" | "{" => depth -= 1,
            _ if depth == 0 && ends_operand(start - 1) => break,
            _ => {}
        }
        start -= 1;
    }
    let mut end = index + 1;
    while end < tokens.len() {
        match text(end) {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" if depth == 0 => break,
            ")" | "]" | "}" => depth -= 1,
            "*" | "/" | "//" | "%" if depth == 0 => break,
            _ if depth == 0 && ends_operand(end) => break,
            _ => {}
        }
        end += 1;
    }
    if start == index || end == index + 1 {
        return Vec::new();
    }
    vec![
        insertion(tokens[start].start, "("),
        SyntaxChange {
            place: tokens[index].clone(),
            text: format!(")|{MODULO}("),
        },
        insertion(tokens[end - 1].end, ")"),
    ]
}

/// Returns whether a sign or word binds its operands less than `%` does, or ends an expression.
fn is_weaker(text: &str) -> bool {
    matches!(
        text,
        "+" | "-"
            | "~"
            | "=="
            | "!="
            | "<"
            | ">"
            | "<="
            | ">="
            | ","
            | ":"
            | "="
            | "and"
            | "or"
            | "not"
            | "in"
            | "if"
            | "else"
            | "recursive"
    )
}

fn is_operator(text: &str) -> bool {
    is_weaker(text) || matches!(text, "*" | "/" | "//" | "%" | "**" | "(" | "[" | "{" | "|")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_minijinja_understands_stays_as_it_is() {
        for source in [
            "a {{ b }} {# {% generation %} 'c #} {% raw %}{% generation %}{{ 1 % 2{% endraw %}",
            "{{ '{% generation %}' ~ \"%}\" }}{{ {'a': {'b': '}}'}} }}{% set generation = '%' %}",
            "{%- if a is not none and b -%} x {% endif %} 5 % of { and {",
            "{{ 'no end",
            "{% for",
            "{{ é['ü'] }}{% endfor",
        ] {
            assert_eq!(adapted(source), source);
        }
    }

    #[test]
    fn the_rest_is_rewritten() {
        for (source, expected) in [
            (
                "{%- generation -%} x {% endgeneration %}",
                "{%- with -%} x {% endwith %}",
            ),
            ("{%generation%}x{%endgeneration+%}", "{%with%}x{%endwith+%}"),
            ("{% for a in 'b' %}", "{% for a in ( 'b')|__each %}"),
            (
                "{%- for a, b in c.d() if b in e recursive -%}",
                "{%- for a, b in ( c.d())|__each if b in e recursive -%}",
            ),
            ("{% for a in b-%}", "{% for a in ( b)|__each-%}"),
            ("{{ a % b }}", "{{ (a )|__modulo( b) }}"),
            ("{{ 'a' % 1.5e-3 }}", "{{ ('a' )|__modulo( 1.5e-3) }}"),
            (
                "{{ 1 + a.b % -c ~ d }}",
                "{{ 1 + (a.b )|__modulo( -c) ~ d }}",
            ),
            (
                "{{- -a * 2 % b % c | d -}}",
                "{{- ((-a * 2 )|__modulo( b) )|__modulo( c | d) -}}",
            ),
            (
                "{% if loop.index0 % 2 == 0 %}",
                "{% if (loop.index0 )|__modulo( 2) == 0 %}",
            ),
            (
                "{{ f('%' % (a, b), [c % d]) }}",
                "{{ f(('%' )|__modulo( (a, b)), [(c )|__modulo( d)]) }}",
            ),
        ] {
            assert_eq!(adapted(source), expected, "{source}");
        }
    }
}
