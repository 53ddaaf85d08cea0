"""Set up TensorFlow before it is loaded; imports nothing of it."""

from __future__ import annotations

import logging
import os


def quiet_tensorflow() -> None:
    """Keep TensorFlow's log to errors, and its sums in one order, where the caller has set nothing else."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # oneDNN reorders sums, and logs a notice at every start
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
