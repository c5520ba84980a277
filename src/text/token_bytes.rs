//! The bytes that each token stands for.

use super::encoder::Encoder;

/// The bytes of every token, concatenated.
pub(super) struct TokenBytes {
    bytes: Vec<u8>,
    ends: Vec<u32>, // Indexed by token.
    longest: usize,
    marks_spaces: bool,
    strips_first_space: bool,
}

/// How the text of a token in `tokenizer.json` spells bytes.
enum Spelling {
    /// One character for each byte (GPT-2, Llama 3).
    ByteLevel,
    /// Text in which `▁` is a space and `<0xNN>` is a single byte (SentencePiece: Llama 2).
    SentencePiece { strips_first_space: bool },
}

impl TokenBytes {
    pub(super) fn new(encoder: &Encoder, vocabulary: u32) -> Result<TokenBytes, String> {
        let spelling = Spelling::of(encoder)?;
        let byte_of_char = byte_level_alphabet();
        let mut all = TokenBytes {
            bytes: Vec::new(),
            ends: Vec::with_capacity(vocabulary as usize),
            longest: 1,
            marks_spaces: matches!(spelling, Spelling::SentencePiece { .. }),
            strips_first_space: matches!(
                spelling,
                Spelling::SentencePiece {
                    strips_first_space: true
                }
            ),
        };
        for id in 0..vocabulary {
            let token = encoder.id_to_token(id).unwrap_or_default();
            let start = all.bytes.len();
            match spelling {
                Spelling::ByteLevel => spell_byte_level(&token, &byte_of_char, &mut all.bytes),
                Spelling::SentencePiece { .. } => spell_sentence_piece(&token, &mut all.bytes),
            }
            all.longest = all.longest.max(all.bytes.len() - start);
            let end = u32::try_from(all.bytes.len()).map_err(|error| error.to_string())?;
            all.ends.push(end);
        }
        all.bytes.shrink_to_fit();
        Ok(all)
    }

    /// Returns the bytes of `token`, or none if no token has this id.
    pub(super) fn of(&self, token: u32) -> &[u8] {
        let token = token as usize;
        let Some(&end) = self.ends.get(token) else {
            return &[];
        };
        let start = if token == 0 { 0 } else { self.ends[token - 1] };
        &self.bytes[start as usize..end as usize]
    }

    /// Returns the length of the longest token in bytes, at least 1.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }

    /// Returns whether `▁` stands for a space in the tokens' spelling.
    pub(super) fn marks_spaces(&self) -> bool {
        self.marks_spaces
    }

    /// Returns whether the encoder puts a space before every text, so that decoding a complete text
    /// must remove it.
    pub(super) fn strips_first_space(&self) -> bool {
        self.strips_first_space
    }
}

impl Spelling {
    /// Recognises the tokenizer's decoder: `ByteLevel`, or the usual steps of a SentencePiece
    /// conversion.
    fn of(encoder: &Encoder) -> Result<Spelling, String> {
        let decoder = match encoder.get_decoder() {
            Some(decoder) => serde_json::to_value(decoder).map_err(|error| error.to_string())?,
            None => return Err("it has no decoder, so its tokens cannot become text".into()),
        };
        let steps = match decoder["decoders"].as_array() {
            Some(steps) => steps.clone(),
            None => vec![decoder],
        };
        let mut byte_level = false;
        let mut marks_spaces = false;
        let mut strips_first_space = false;
        for step in &steps {
            match step["type"].as_str().unwrap_or_default() {
                "ByteLevel" => byte_level = true,
                "Replace" if step["pattern"]["String"] == "▁" && step["content"] == " " => {
                    marks_spaces = true
                }
                "Metaspace" => {
                    marks_spaces = true;
                    strips_first_space = step["prepend_scheme"] != "never";
                }
                "Strip" if step["content"] == " " && step["start"] == 1 && step["stop"] == 0 => {
                    strips_first_space = true
                }
                "ByteFallback" | "Fuse" => {}
                other => return Err(format!("its decoder step {other:?} is not supported")),
            }
        }
        match (byte_level, marks_spaces) {
            (true, false) => Ok(Spelling::ByteLevel),
            (false, true) => Ok(Spelling::SentencePiece { strips_first_space }),
            _ => Err("its decoder must be either byte-level or SentencePiece".into()),
        }
    }
}

/// Returns GPT-2's alphabet, indexed by character. A printable byte is its own character; the other
/// bytes, in order, are the characters from U+0100 on.
pub(super) fn byte_level_alphabet() -> [Option<u8>; 0x144] {
    let mut alphabet = [None; 0x144];
    let mut next = 0x100;
    for byte in 0..=u8::MAX {
        let printable = matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
        let char = if printable { usize::from(byte) } else { next };
        if !printable {
            next += 1;
        }
        alphabet[char] = Some(byte);
    }
    alphabet
}

/// Appends the bytes of a byte-level token. A token with a character outside the alphabet was added
/// by hand, and its text is written as it is.
fn spell_byte_level(token: &str, byte_of_char: &[Option<u8>], bytes: &mut Vec<u8>) {
    let spelled: Option<Vec<u8>> = token
        .chars()
        .map(|char| byte_of_char.get(char as usize).copied().flatten())
        .collect();
    match spelled {
        Some(spelled) => bytes.extend(spelled),
        None => bytes.extend_from_slice(token.as_bytes()),
    }
}

fn spell_sentence_piece(token: &str, bytes: &mut Vec<u8>) {
    let hex = token
        .strip_prefix("<0x")
        .and_then(|rest| rest.strip_suffix('>'))
        .filter(|hex| hex.len() == 2);
    match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
        Some(byte) => bytes.push(byte),
        None => bytes.extend(token.replace('▁', " ").bytes()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_byte_level_alphabet_has_every_byte_once() {
        let mut bytes: Vec<u8> = byte_level_alphabet().into_iter().flatten().collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=u8::MAX).collect::<Vec<u8>>());
        assert_eq!(byte_level_alphabet()['Ġ' as usize], Some(b' '));
    }

    #[test]
    fn sentence_piece_tokens_spell_bytes_and_spaces() {
        let spelled = |token: &str| {
            let mut bytes = Vec::new();
            spell_sentence_piece(token, &mut bytes);
            bytes
        };
        assert_eq!(spelled("▁Paris"), b" Paris");
        assert_eq!(spelled("<0xE2>"), [0xE2]);
        assert_eq!(spelled("<0xZZ>"), b"<0xZZ>");
    }
}
