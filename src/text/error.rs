//! The errors of loading a tokenizer and of turning text into tokens.

use std::fmt;

/// Why a checkpoint's text files cannot be loaded, or why a text cannot be encoded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TextError {
    /// A file of the checkpoint cannot be used.
    BadFile {
        /// The file's name.
        file: &'static str,
        /// What is wrong with it.
        why: String,
    },
    /// The tokenizer cannot encode a text.
    Encoding(String),
    /// The tokenizer turns a user's text into a control token, however the text is cut.
    BecomesControl {
        /// The text: a single character.
        text: String,
        /// The control token.
        token: String,
    },
    /// The text has so many tokens that it was not encoded: see `Tokenizer::with_context`.
    TooLong {
        /// The length of the text.
        bytes: usize,
        /// A number of tokens that the text has at least.
        min_tokens: usize,
        /// The context length in tokens.
        context: u32,
    },
    /// The tokenizer produced a token that the model does not have.
    BeyondVocabulary {
        /// The token.
        token: u32,
        /// The number of tokens that the model has.
        vocabulary: u32,
    },
}

impl fmt::Display for TextError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TextError::BadFile { file, why } => write!(f, "{file}: {why}"),
            TextError::Encoding(why) => write!(f, "the tokenizer cannot encode this text: {why}"),
            TextError::BecomesControl { text, token } => write!(
                f,
                "the model's tokenizer turns {text:?} into its control token {token:?}; leave \
                 this character out"
            ),
            TextError::TooLong {
                bytes,
                min_tokens,
                context,
            } => write!(
                f,
                "the text of {bytes} bytes has at least {min_tokens} tokens; the context has \
                 {context}"
            ),
            TextError::BeyondVocabulary { token, vocabulary } => write!(
                f,
                "the tokenizer produced token {token}, but the model has only {vocabulary} tokens"
            ),
        }
    }
}

impl std::error::Error for TextError {}

/// Why a conversation cannot become a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TemplateError {
    /// The template rejects the messages, for example because of the order of roles. The string is
    /// the template's own explanation.
    Rejected(String),
    /// The template fails, takes too many steps or writes too much text.
    Failed(String),
    /// The messages use so many private-use characters that too few are left as placeholders.
    NoPlaceholder,
    /// An argument of the template has a control token in its text. The string is its name.
    ControlInArgument(String),
    /// The final message is to be continued, but it is empty or the template does not write it.
    NoFinalMessage,
    /// The rendered text cannot be encoded.
    Text(TextError),
}

impl fmt::Display for TemplateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            TemplateError::Rejected(why) => {
                write!(f, "the model's chat template rejects these messages: {why}")
            }
            TemplateError::Failed(why) => {
                write!(
                    f,
                    "the model's chat template fails on these messages: {why}"
                )
            }
            TemplateError::NoPlaceholder => {
                write!(f, "the messages contain too many private-use characters")
            }
            TemplateError::ControlInArgument(name) => write!(
                f,
                "the text of '{name}' contains a control token of the model; leave it out"
            ),
            TemplateError::NoFinalMessage => write!(
                f,
                "the final message cannot be continued: it is empty, or the chat template changes \
                 its text"
            ),
            TemplateError::Text(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for TemplateError {}
