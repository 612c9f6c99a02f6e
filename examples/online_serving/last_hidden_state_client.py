# SPDX-License-Identifier: Apache-2.0
"""Ask a server for last hidden states: by chat, by completion, with an image.

Start any model, with no option of its own:

    vllm serve Qwen/Qwen3-0.6B

Then:

    python last_hidden_state_client.py
    python last_hidden_state_client.py --image cat.png   # a vision-language model

Each vector is what the model's first token comes from. With curl:

    curl -s localhost:8000/v1/completions -H 'Content-Type: application/json' -d '{
        "model": "Qwen/Qwen3-0.6B", "prompt": "A river starts as rain.",
        "max_tokens": 1, "kv_transfer_params": {"return_last_hidden_state": true}}'
"""

import argparse
import base64
import mimetypes
from pathlib import Path
from typing import Any

import numpy as np
from openai import OpenAI

from vllm.v1.hidden_states.client import last_hidden_state

TEXTS = [
    "A river starts as rain on a hill.",
    "The rain on the hill becomes a river.",
    "By four the ovens are hot.",
]


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default="EMPTY")
    parser.add_argument("--image", type=Path, help="a picture, to ask about it")
    return parser.parse_args()


def content_of(text: str, image: Path | None) -> Any:
    """A chat message's content: a text, and a picture where there is one."""
    if image is None:
        return text
    kind = mimetypes.guess_type(image)[0] or "image/png"
    encoded = base64.b64encode(image.read_bytes()).decode()
    url = {"url": f"data:{kind};base64,{encoded}"}
    return [{"type": "image_url", "image_url": url}, {"type": "text", "text": text}]


def show(title: str, response: Any) -> np.ndarray:
    """Print what came, and return the vector."""
    vector = last_hidden_state(response)
    told = response.kv_transfer_params["last_hidden_state_metadata"]
    print(f"{title}: {vector.shape} of position {told['position']},", end=" ")
    print(f"{told['representation']}, norm {np.linalg.norm(vector):.3f}")
    return vector


def main() -> None:
    arguments = parse_arguments()
    client = OpenAI(base_url=arguments.base_url, api_key=arguments.api_key)
    model = client.models.list().data[0].id
    # base64 has a quarter of the bytes of a list of numbers.
    options = {"return_last_hidden_state": True, "encoding_format": "base64"}
    body = {"kv_transfer_params": options}

    chat = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": content_of(TEXTS[0], arguments.image)}],
        max_completion_tokens=1,
        extra_body=body,
    )
    show("a chat" + (" with an image" if arguments.image else ""), chat)

    completion = client.completions.create(
        model=model, prompt=TEXTS[0], max_tokens=1, extra_body=body
    )
    show("a completion", completion)

    # Several prompts in one request: a vector in each choice.
    body = {"kv_transfer_params": options | {"normalize": True}}
    several = client.completions.create(
        model=model, prompt=TEXTS, max_tokens=1, extra_body=body
    )
    vectors = np.stack([last_hidden_state(choice) for choice in several.choices])
    print(f"cosines of {len(TEXTS)} texts:\n{np.round(vectors @ vectors.T, 3)}")


if __name__ == "__main__":
    main()
