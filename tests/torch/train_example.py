"""Train the example where torch is, and score all films for some users by torch alone.

python -m tests.torch.train_example DATA BUNDLE ANSWERS.json
"""

import json
import sys
from pathlib import Path

import torch

from examples.torch_movielens import TEMPERATURE, UNKNOWN, main

data, out, answers = map(Path, sys.argv[1:])
bundle, users, films = main(data, out, epochs=1)
users.eval()
films.eval()
people = [(1, 31.0, [1, 2, 3]), (17, 40.0, [5]), (40, 22.0, []), (UNKNOWN, 25.0, [7, 7, 9])]
history = torch.tensor([last + [UNKNOWN] * (20 - len(last)) for _, _, last in people])
with torch.no_grad():
    queries = users(torch.tensor([user for user, _, _ in people]), history, torch.tensor([age for _, age, _ in people]))
    scores = queries @ torch.tensor(bundle.embeddings).T / TEMPERATURE
requested = [
    {"user_id": str(user) if user else "a stranger", "age": age, "history": [str(film - 1) for film in last]}
    for user, age, last in people
]
ids = bundle.labels.ids.to_pylist()
rows = [dict(zip(ids, row, strict=True)) for row in scores.tolist()]
answers.write_text(json.dumps([{"features": user, "scores": row} for user, row in zip(requested, rows, strict=True)]))
