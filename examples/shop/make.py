"""Make the tables of this folder again: `python examples/shop/make.py`.

Taste has eight dimensions: a product's is the sum of its category's, its brand's and some of its own, a user's a normal
vector. A click is drawn by popularity × exp(taste of the user · taste of the product); popularity is Zipf's law.
"""

from datetime import datetime, timedelta
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

USERS, PRODUCTS, CLICKS, DAYS, DIM = 400, 400, 12_000, 60, 8
CATEGORIES = ("teapot", "kettle", "mug", "lamp", "rug", "chair", "desk", "shelf", "clock", "vase", "pan", "knife")
COLOURS = ("blue", "red", "green", "white", "black", "grey", "yellow", "brown")
MATERIALS = ("oak", "steel", "glass", "clay", "brass", "paper")
START = datetime(2026, 1, 1)


def main() -> None:
    """Write clicks.parquet, products.parquet and users.parquet next to this file."""
    rng = np.random.default_rng(0)
    category_P, brand_P = rng.integers(len(CATEGORIES), size=PRODUCTS), rng.integers(20, size=PRODUCTS)
    taste_PD = (
        0.5 * rng.normal(size=(len(CATEGORIES), DIM))[category_P]
        + 0.35 * rng.normal(size=(20, DIM))[brand_P]
        + 0.2 * rng.normal(size=(PRODUCTS, DIM))
    )
    logit_UP = rng.normal(size=(USERS, DIM)) @ taste_PD.T - 0.7 * np.log1p(rng.permutation(PRODUCTS))
    probability_UP = np.exp(logit_UP - logit_UP.max(axis=1, keepdims=True))
    probability_UP /= probability_UP.sum(axis=1, keepdims=True)
    activity_U = rng.lognormal(0, 0.7, USERS)
    user_C = rng.choice(USERS, CLICKS, p=activity_U / activity_U.sum())
    product_C = np.empty(CLICKS, np.int64)
    for user in range(USERS):
        rows = np.flatnonzero(user_C == user)
        product_C[rows] = rng.choice(PRODUCTS, len(rows), p=probability_UP[user])
    second_C = np.sort(rng.uniform(0, DAYS * 86_400, CLICKS)).astype(int)
    tables = {
        "clicks": {
            "user_id": [f"u{user}" for user in user_C],
            "product_id": [f"p{product}" for product in product_C],
            "clicked_at": pa.array([START + timedelta(seconds=int(s)) for s in second_C], pa.timestamp("s")),
        },
        "products": {
            "product_id": [f"p{row}" for row in range(PRODUCTS)],
            "title": [
                f"{rng.choice(COLOURS)} {rng.choice(MATERIALS)} {CATEGORIES[category]}" for category in category_P
            ],
            "category": [CATEGORIES[category] for category in category_P],
            "brand": [f"brand{brand}" for brand in brand_P],
            "price": np.round(rng.lognormal(3, 0.5, PRODUCTS), 2),
            "in_stock": rng.random(PRODUCTS) < 0.9,
        },
        "users": {
            "user_id": [f"u{row}" for row in range(USERS)],
            "country": rng.choice(["DK", "NO", "SE"], USERS),
        },
    }
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), Path(__file__).with_name(f"{name}.parquet"), compression="zstd")


if __name__ == "__main__":
    main()
