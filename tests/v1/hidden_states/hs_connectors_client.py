# SPDX-License-Identifier: Apache-2.0
"""Reads files of hidden states with `hs-connectors`, by its own classes.

    python hs_connectors_client.py TRANSFER FOLDER

TRANSFER is ``FileTransfer`` or ``FP8Transfer``. Each line of the standard input is a
request's ``kv_transfer_params``, as JSON; each is read in a thread of its own as soon
as it comes. What is read is saved as ``FOLDER/i.safetensors``, and what was read is
deleted; each line of the standard output is the index ``i``, or an error.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from hs_connectors import FileTransfer, FP8Transfer
from safetensors.torch import save_file


def main(name: str, folder: Path) -> None:
    transfer = FileTransfer(folder)
    if name == "FP8Transfer":
        transfer = FP8Transfer(folder, torch.float32)

    def read(index: int, params: dict[str, Any]) -> None:
        try:
            tensors = transfer.get_generated(params)
            if tensors is None:
                raise FileNotFoundError(params["hidden_states_path"])
            save_file(tensors, folder / f"{index}.safetensors")
            transfer.delete(params["hidden_states_path"])
        except Exception as error:
            say(f"{index}: {error!r}")
        else:
            say(str(index))

    say("ready")
    with ThreadPoolExecutor(256) as pool:
        for index, line in enumerate(sys.stdin):
            pool.submit(read, index, json.loads(line))


def say(text: str) -> None:
    """A line at once: by ``print`` those of several threads would get mixed up."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
