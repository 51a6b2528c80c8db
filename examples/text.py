# SPDX-License-Identifier: Apache-2.0
"""Text for the examples: the Python manual that ships with every CPython, as bytes. No network."""

import pydoc_data.topics

import torch


def manual() -> torch.Tensor:
    """All pages, one byte an element."""
    pages = "".join(pydoc_data.topics.topics[key] for key in sorted(pydoc_data.topics.topics))
    return torch.tensor(list(pages.encode()), dtype=torch.long)


class Rows(torch.utils.data.Dataset):
    """Consecutive rows of ``length`` bytes, as a Hugging Face causal language model wants them."""

    def __init__(self, first: int, number: int, length: int) -> None:
        self.rows = manual()[first * length : (first + number) * length].view(-1, length)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}
