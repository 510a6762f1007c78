"""Prompts of several kinds: prose, questions, code, lists, chat turns, other languages, odd characters, one longer text."""


def _chat(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village at the edge of a great forest,",
    "Water boils at a temperature of",
    "The three primary colours are",
    "In 1969, the first humans",
    "def fibonacci(n):\n    ",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, COUNT(*) FROM",
    "import numpy as np\n\n# Solve a linear system\n",
    '{"name": "Ada", "age": 36, "skills": [',
    "1, 1, 2, 3, 5, 8, 13,",
    "2 + 2 = 4\n3 + 5 = 8\n7 + 6 =",
    "Dear Sir or Madam,\n\nI am writing to",
    "Ingredients:\n- 200 g flour\n- 2 eggs\n-",
    "Q: Why is the sky blue?\nA:",
    "The mitochondria is the powerhouse of",
    _chat("Hello, who are you?"),
    _chat("Write a haiku about the sea."),
    _chat("Explain photosynthesis to a child in two sentences."),
    _chat("List five European capitals."),
    _chat("What is 17 times 23?"),
    _chat("Translate 'good morning' into Spanish, French and German."),
    _chat("Give me a Python function that reverses a string."),
    _chat("Why do we dream?"),
    "Le petit chat est",
    "Die Würde des Menschen ist",
    "El sol sale por",
    "日本の首都は",
    "Москва является",
    "🙂🎉🙂🎉🙂",
    "   \n\n\t  The  spaces   here are     odd",
    (
        "The committee met on Tuesday to discuss the bridge. Built in 1911, it carries both the railway and the old road across "
        "the river, and for most of its life it has been painted the same dark green. Engineers reported last spring that two of "
        "the eleven spans need new bearings, that the eastern pier has moved by four millimetres since it was first surveyed, and "
        "that the cost of doing nothing would soon exceed the cost of repair. Several members asked whether the work could be "
        "done without closing the line. The chief engineer answered that"
    ),
]
