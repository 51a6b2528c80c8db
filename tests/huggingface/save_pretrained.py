# SPDX-License-Identifier: Apache-2.0
"""Writes a small model of a kind to a directory: ``save_pretrained.py llama DIRECTORY``."""

import sys

import torch
from texts import fresh_model

fresh_model(sys.argv[1]).to(torch.float32).save_pretrained(sys.argv[2])
