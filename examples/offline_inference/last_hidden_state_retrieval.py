# SPDX-License-Identifier: Apache-2.0
"""Retrieval with a model that generates: which section answers a question?

Every section of this repository's documentation, and each question, gets the vector
behind the first token of "... In one word, this is about:". The nearest sections are
printed, and the matrix of similarities goes to a PNG (``--plot``).

Without ``--model`` a tiny model with random weights is made, whose answers mean
nothing:

    python last_hidden_state_retrieval.py --model Qwen/Qwen3-0.6B
"""

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

sys.path.append(str(Path(__file__).parents[1] / "features/speculative_decoding"))
from tiny_model import make_tiny_model  # type: ignore[import-not-found]  # noqa: E402

# Before anything that cleans up when the program ends, such as a temporary directory.
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.v1.hidden_states.client import last_hidden_state  # noqa: E402

matplotlib.use("Agg")  # no display is needed to write a file

ROOT = Path(__file__).parents[2]
PAGES = ["README.md", "docs/features/last_hidden_state.md", "docs/design/series.md"]
QUESTIONS = [
    "How do I install it?",
    "How do patches become a wheel?",
    "What does the vector mean?",
]
TEMPLATE = "{text}\n\nIn one word, this is about:"
MAX_CHARACTERS = 1200


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="name or path; default: a tiny one, made here")
    parser.add_argument("--enforce-eager", action="store_true", help="compile nothing")
    parser.add_argument("--questions", nargs="+", default=QUESTIONS, metavar="TEXT")
    parser.add_argument("--plot", type=Path, default=Path("similarity.png"))
    return parser.parse_args()


def read_sections() -> dict[str, str]:
    """The documentation's sections, by their titles."""
    sections: dict[str, str] = {}
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for section in text.split("\n## ")[1:]:
            title, _, body = section.partition("\n")
            sections[title] = body.strip()[:MAX_CHARACTERS]
    return sections


def embed(llm: LLM, texts: list[str]) -> np.ndarray:
    """Unit vectors of texts, ``[texts, hidden_size]``.

    The mean is taken off: the vectors of one model share a large part, which says
    nothing of a text.
    """
    options = {"return_last_hidden_state": True, "encoding_format": "base64"}
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": options})
    outputs = llm.generate([TEMPLATE.format(text=text) for text in texts], sampling)
    vectors = np.stack([last_hidden_state(output) for output in outputs])
    vectors -= vectors.mean(axis=0)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def plot(similarity: np.ndarray, names: list[str], path: Path) -> None:
    """Draw the matrix of similarities, ``[names, names]``."""
    from matplotlib import pyplot

    size = 2 + 0.3 * len(names)
    figure, axes = pyplot.subplots(figsize=(size, size), layout="constrained")
    image: Any = axes.imshow(similarity, vmin=-1, vmax=1, cmap="RdBu_r")
    axes.set_xticks(range(len(names)), names, rotation=90)
    axes.set_yticks(range(len(names)), names)
    figure.colorbar(image, label="cosine similarity", shrink=0.7)
    figure.savefig(path)


def run(arguments: argparse.Namespace, model: str) -> None:
    """Embed, print the nearest sections of each question, and plot."""
    llm = LLM(model=model, enforce_eager=arguments.enforce_eager, max_model_len=2048)
    sections = read_sections()
    titles, questions = list(sections), list(arguments.questions)
    texts = [f"{title}\n{body}" for title, body in sections.items()]
    vectors = embed(llm, texts + questions)
    similarity = vectors @ vectors.T
    for number, question in enumerate(questions, len(titles)):
        print(f"\n{question}")
        for place in np.argsort(-similarity[number, : len(titles)])[:3]:
            print(f"  {similarity[number, place]:+.3f}  {titles[place]}")
    plot(similarity, titles + questions, arguments.plot)
    print(f"\nsimilarities of all pairs: {arguments.plot}")


def main() -> None:
    arguments = parse_arguments()
    with tempfile.TemporaryDirectory(prefix="last-hidden-state-") as folder:
        model = arguments.model or make_tiny_model(Path(folder) / "tiny-qwen3")
        run(arguments, str(model))


# The engine may start processes that import this file again.
if __name__ == "__main__":
    main()
