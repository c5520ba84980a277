"""The questions of `lm_eval_scores.py`: text, choices, index of the right choice."""

QUESTIONS = [
    ("Q: What is the capital of France?\nA:", [" Paris", " London", " Rome", " a river"], 0),
    ("Q: What is the opposite of hot?\nA:", [" cold", " blue", " seven", " Monday"], 0),
    ("Q: Which day comes after Monday?\nA:", [" Sunday", " Tuesday", " Friday", " red"], 1),
    ("Q: What colour is the sky?\nA:", [" two", " green 🐦", " blue"], 2),
]


def requests_of(tokenizer):
    """Returns the context and the continuation of each request, as tokens: (choices, texts)."""

    def tokens(text):
        return tokenizer(text, add_special_tokens=False).input_ids

    choices, texts = [], []
    for question, answers, best in QUESTIONS:
        context = tokens(question)
        choices += [(context, tokens(question + answer)[len(context) :]) for answer in answers]
        texts.append(([tokenizer.bos_token_id], tokens(question + answers[best])))
    return choices, texts
