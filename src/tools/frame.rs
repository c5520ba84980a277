//! What stands around calls in an answer, in the format of each family of models.

/// A family of models that writes calls in its own way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    /// Hermes and Qwen: each call in tags of its own. Models whose template has no tools are told
    /// to write calls in this format too.
    ///
    /// ```text
    /// <tool_call>
    /// {"name": "get_weather", "arguments": {"city": "Paris"}}
    /// </tool_call>
    /// ```
    Hermes,
    /// Falcon 3: a list of calls in one pair of tags.
    ///
    /// ```text
    /// <tool_call>
    /// [
    ///   {"name": "get_weather", "arguments": {"city": "Paris"}},
    ///   {"name": "get_weather", "arguments": {"city": "Bern"}}
    /// ]
    /// </tool_call>
    /// ```
    Falcon,
    /// Llama 3: the answer is a call, without tags. Several calls have `; ` between them. The token
    /// `<|python_tag|>` may stand before the first.
    ///
    /// ```text
    /// {"name": "get_weather", "parameters": {"city": "Paris"}}
    /// ```
    Llama,
    /// Qwen 3.5, Qwen3-Coder and Nemotron 3: each call in tags of its own, and each argument too. A
    /// value that is a text stands there as it is, all others are JSON.
    ///
    /// ```text
    /// <tool_call>
    /// <function=get_weather>
    /// <parameter=city>
    /// Paris
    /// </parameter>
    /// </function>
    /// </tool_call>
    /// ```
    Xml,
}

/// The token that may stand before the first call of Llama 3.
pub(super) const PYTHON_TAG: &str = "<|python_tag|>";

impl Family {
    /// Returns the family whose format a chat template shows.
    pub(super) fn find(template: &str) -> Option<Family> {
        let has = |text: &str| template.contains(text);
        // A list opens after the tag of Falcon. The line break between them can be escaped.
        if has("<function=") && has("<parameter=") && has("<tool_call>") {
            Some(Family::Xml)
        } else if has("<tool_call>\n[") || has("<tool_call>\\n[") {
            Some(Family::Falcon)
        } else if has("<tool_call>") && (has("\"arguments\\\"") || has("\"arguments\"")) {
            Some(Family::Hermes)
        } else if has("\"parameters\": ") && has("\"name\": ") {
            Some(Family::Llama)
        } else {
            None
        }
    }

    /// Returns what stands around the calls of the family.
    pub(super) fn frame(self) -> &'static CallFrame {
        match self {
            Family::Hermes | Family::Xml => &HERMES,
            Family::Falcon => &FALCON,
            Family::Llama => &LLAMA,
        }
    }
}

/// What stands around calls. White space between the parts does not matter to the parser.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct CallFrame {
    /// The tag before the first call. Without one, a call stands at the beginning of the answer.
    pub(super) open: &'static str,
    /// What stands between the tag and the first call.
    pub(super) begin: &'static str,
    /// The key of a call's arguments.
    pub(super) arguments: &'static str,
    /// What stands between two calls. Without it, each call has tags of its own.
    pub(super) separator: Option<&'static str>,
    /// What stands between the last call and the closing tag.
    pub(super) end: &'static str,
    /// The tag after the last call.
    pub(super) close: &'static str,
    /// The white space inside of the tags.
    pub(super) gap: &'static str,
    /// The white space before a call that follows another, and before the first of a list.
    pub(super) between: &'static str,
}

const HERMES: CallFrame = CallFrame {
    open: "<tool_call>",
    begin: "",
    arguments: "arguments",
    separator: None,
    end: "",
    close: "</tool_call>",
    gap: "\n",
    between: "\n",
};

const FALCON: CallFrame = CallFrame {
    open: "<tool_call>",
    begin: "[",
    arguments: "arguments",
    separator: Some(","),
    end: "]",
    close: "</tool_call>",
    gap: "\n",
    between: "\n  ",
};

const LLAMA: CallFrame = CallFrame {
    open: "",
    begin: "",
    arguments: "parameters",
    separator: Some(";"),
    end: "",
    close: "",
    gap: "",
    between: " ",
};

/// The tokens of tags. A tag without one is ordinary text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TagTokens {
    pub(super) open: Option<u32>,
    pub(super) close: Option<u32>,
    pub(super) python: Option<u32>,
}
