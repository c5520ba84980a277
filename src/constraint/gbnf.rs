//! Translates grammars in GBNF, the notation of llama.cpp, into Lark.
//!
//! A rule is `name ::= alternatives`. Its parts are strings, character classes, `.`, names and
//! groups, each with `*`, `+`, `?` or `{m,n}`. A rule ends where the next one begins. `#` begins a
//! comment. The rule `root` is the whole answer.

use std::fmt::Write;

/// Translates a grammar.
///
/// # Errors
/// What is wrong with it.
pub(super) fn to_lark(text: &str) -> Result<String, String> {
    let tokens = Lexer { rest: text }.tokens()?;
    let mut lark = String::new();
    let mut has_root = false;
    let mut index = 0;
    while index < tokens.len() {
        let [Token::Name(name), Token::Defines, ..] = &tokens[index..] else {
            return Err("a rule must begin with a name and '::='".to_owned());
        };
        has_root |= name == "root";
        let _ = write!(lark, "{}:", rule_name(name)); // Writing into a string cannot fail.
        index += 2;
        while index < tokens.len() && !begins_rule(&tokens[index..]) {
            match &tokens[index] {
                Token::Name(name) => {
                    lark.push(' ');
                    lark += &rule_name(name);
                }
                Token::Part(part) => {
                    lark.push(' ');
                    lark += part;
                }
                Token::Repeat(repeat) => lark += repeat,
                Token::Defines => return Err("'::=' must follow a name".to_owned()),
            }
            index += 1;
        }
        lark.push('\n');
    }
    if !has_root {
        return Err("the rule 'root' is missing".to_owned());
    }
    Ok(lark)
}

/// Returns the name of a rule in Lark: `start` for `root`, otherwise one that is no keyword.
fn rule_name(name: &str) -> String {
    if name == "root" {
        return "start".to_owned();
    }
    // Lark allows neither capitals nor hyphens here. A letter, '_' or '0' after the added '_' says
    // which character stood there, so different names stay different.
    let mut lark = String::from("r_");
    for c in name.chars() {
        match c {
            'a'..='z' | '0'..='9' => lark.push(c),
            'A'..='Z' => lark.extend(['_', c.to_ascii_lowercase()]),
            '-' => lark += "_0",
            _ => lark += "__",
        }
    }
    lark
}

enum Token {
    Name(String),
    Defines,
    /// A string, a class, a bracket or a bar, as Lark writes it.
    Part(String),
    Repeat(String),
}

fn begins_rule(tokens: &[Token]) -> bool {
    matches!(tokens, [Token::Name(_), Token::Defines, ..])
}

struct Lexer<'a> {
    rest: &'a str,
}

impl<'a> Lexer<'a> {
    fn tokens(mut self) -> Result<Vec<Token>, String> {
        let mut tokens = Vec::new();
        loop {
            self.rest = self.rest.trim_start();
            let Some(first) = self.rest.chars().next() else {
                return Ok(tokens);
            };
            tokens.push(match first {
                '#' => {
                    self.take(self.rest.find('\n').unwrap_or(self.rest.len()));
                    continue;
                }
                '"' => Token::Part(self.quoted('"')?),
                '[' => Token::Part(format!("/{}/", self.quoted(']')?.replace('/', "\\/"))),
                '.' => {
                    self.take(1);
                    Token::Part("/(?s:.)/".to_owned())
                }
                '(' | ')' | '|' => Token::Part(self.take(1).to_owned()),
                '*' | '+' | '?' => Token::Repeat(self.take(1).to_owned()),
                '{' => Token::Repeat(self.repetition()?),
                ':' if self.rest.starts_with("::=") => {
                    self.take(3);
                    Token::Defines
                }
                _ => Token::Name(self.name()?),
            });
        }
    }

    fn take(&mut self, bytes: usize) -> &'a str {
        let (taken, rest) = self.rest.split_at(bytes);
        self.rest = rest;
        taken
    }

    fn name(&mut self) -> Result<String, String> {
        let is_part = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        let end = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len());
        if end == 0 {
            let c = self.rest.chars().next().unwrap_or_default();
            return Err(format!("{c:?} has no meaning here"));
        }
        Ok(self.take(end).to_owned())
    }

    /// Takes a string or a class up to its `end`, with its escapes.
    fn quoted(&mut self, end: char) -> Result<String, String> {
        let mut chars = self.rest.char_indices().skip(1);
        while let Some((at, c)) = chars.next() {
            match c {
                '\\' => drop(chars.next()),
                '\n' => break,
                c if c == end => return escapes(self.take(at + 1), end),
                _ => {}
            }
        }
        Err(format!("{end:?} is missing before the end of the line"))
    }

    fn repetition(&mut self) -> Result<String, String> {
        let end = self.rest.find('}').ok_or("'}' is missing")?;
        let inside: String = self.take(end + 1)[1..end].split_whitespace().collect();
        let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let is_valid = match inside.split_once(',') {
            Some((least, most)) => is_number(least) && (most.is_empty() || is_number(most)),
            None => is_number(&inside),
        };
        if !is_valid {
            return Err(format!("'{{{inside}}}' is no repetition"));
        }
        Ok(format!("{{{inside}}}"))
    }
}

/// Translates the escapes of a string or a class.
fn escapes(text: &str, end: char) -> Result<String, String> {
    let mut out = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        let escaped = chars.next().unwrap_or_default();
        let digits = match escaped {
            'x' => 2,
            'u' => 4,
            'U' => 8,
            'n' | 'r' | 't' | '\\' | '"' | '[' | ']' => {
                match (escaped, end) {
                    ('[' | ']', '"') => out.push(escaped),
                    ('"', ']') => out.push('"'),
                    _ => out.extend(['\\', escaped]),
                }
                continue;
            }
            _ if end == ']' && escaped.is_ascii_punctuation() => {
                out.extend(['\\', escaped]);
                continue;
            }
            _ => return Err(format!("'\\{escaped}' is no escape")),
        };
        let hex: String = chars.by_ref().take(digits).collect();
        let code = u32::from_str_radix(&hex, 16).ok().and_then(char::from_u32);
        let code = code.ok_or_else(|| format!("'\\{escaped}{hex}' is no character"))?;
        match end {
            '"' => {
                let quoted = serde_json::Value::from(code.to_string()).to_string();
                out += &quoted[1..quoted.len() - 1];
            }
            _ => {
                let _ = write!(out, "\\x{{{:X}}}", u32::from(code));
            }
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rules_become_rules_of_lark() {
        let gbnf = r#"
            # A list of numbers.
            root ::= "[" (num-ber ("," num-ber)*)? "]" | "none"
                     | "\x41\n"
            num-ber ::= [1-9] [0-9]{0,3} [^\]/\x41]
        "#;
        let lark = "start: \"[\" ( r_num_0ber ( \",\" r_num_0ber )* )? \"]\" | \"none\" \
                    | \"A\\n\"\nr_num_0ber: /[1-9]/ /[0-9]/{0,3} /[^\\]\\/\\x{41}]/\n";
        assert_eq!(to_lark(gbnf).unwrap(), lark);
    }

    #[test]
    fn different_names_stay_different() {
        let names = [
            "a-b", "a_b", "aB", "a_0b", "a-0b", "a--b", "a__b", "a-_b", "a_-b",
        ];
        let translated: std::collections::HashSet<String> =
            names.iter().map(|name| rule_name(name)).collect();
        assert_eq!(translated.len(), names.len(), "{translated:?}");
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (gbnf, why) in [
            ("a ::= \"b\"", "'root' is missing"),
            ("root ::= \"b", "'\"' is missing"),
            ("root ::= b{x}", "no repetition"),
            ("\"b\"", "must begin with a name"),
            ("root ::= a ::= ::= b", "must follow a name"),
            ("root ::= \"\\q\"", "no escape"),
            ("root ::= %", "has no meaning"),
        ] {
            let error = to_lark(gbnf).unwrap_err();
            assert!(error.contains(why), "{gbnf}: {error}");
        }
    }
}
