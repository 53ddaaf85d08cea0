"""Set up TensorFlow before it is loaded; imports nothing of it."""

from __future__ import annotations

import logging
import os


def quiet_tensorflow() -> None:
    """Limit TensorFlow's log to errors and fix its order of sums, unless the environment differs."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # oneDNN reorders sums, and logs a notice at every start
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
