"""Generated shops with a known law: events, users, and products with category, brand, price, and mostly more.

A user `n` at time t chooses product `p` with probability ∝ w_p(t) · exp(β·u_n·z_p): popularity times taste. `z` is the
sum of a category part, a brand part and an individual part, which the picture shows with noise and only behaviour
reveals fully. Taste may be simpler: shares of the categories or brands, within which all users choose alike by w; or an
individual part alone. Such products have neither a text nor a picture.

    static    w and u never change; w is a Zipf law
    sessions  visits of several events: a visit keeps to one category, and prefers products like the previous one
    drift     w_p(t) rises and falls: every product has its popular weeks
    fresh     a third of the products appear during the log, and are most popular when new; a column has the day
    seasonal  every category has its weekday; a third have a feast of three days every 28 days, also in the last week
    moving    shares of 24 categories; w_p(t) walks at random; a third of the products appear during the log, in bursts
    branded   shares of the brands; w_p(t) rises and falls
    personal  individual parts alone: no column tells anything

Legend: `P` products, `U` users, `N` events, `D` latent coordinates.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from longtail.bundle.arrays import Float32, Float64, Int64
from longtail.bundle.store import atomic_directory

Law = Literal["static", "sessions", "drift", "fresh", "seasonal", "moving", "branded", "personal"]
LAWS: tuple[Law, ...] = get_args(Law)
_BORN, _PLAIN = ("fresh", "moving"), ("moving", "branded", "personal")
"""Laws by which products appear during the log, and laws of products without text and picture."""
DAYS, DIMS, PICTURE = 90, 16, 32
START = np.datetime64("2024-01-01T00:00:00", "s")
_TASTE, _VISIT, _NEXT = 7.0, 2.5, 2.0
"""Weights of taste, of a visit's category and of the previous product, in log-odds."""
_SHARE, _STEP = 0.3, 0.3
"""Concentration of a user's shares of categories or brands; standard deviation of a walk's steps a day, nats."""


@dataclass(frozen=True)
class Shop:
    """Hold the parameters of the law for every product and user.

    Attributes:
        z_PD, u_UD: latent vectors of about unit norm; or indicators of groups and the logs of shares.
        category_P, brand_P: int64.
        log_price_P: natural log of the price.
        log_weight_P: log w of the Zipf law.
        born_P: day of the first sale; 0 for a product that is available from the beginning.
        peak_P: day of highest demand.
        walk_PT: change of log w by day.
        activity_U: each user's share of all events.
    """

    z_PD: Float64
    u_UD: Float64
    category_P: Int64
    brand_P: Int64
    log_price_P: Float64
    log_weight_P: Float64
    born_P: Float64
    peak_P: Float64
    walk_PT: Float64
    activity_U: Float64

    def log_weights(self, law: Law, day: float) -> Float64:
        """Compute log w_p at a time, float64 [P]; −∞ for a product that is not sold yet."""
        log_weight_P = self.log_weight_P
        if law in ("drift", "branded"):
            log_weight_P = log_weight_P - np.abs(day - self.peak_P) / 12
        if law == "fresh":
            age_P = day - self.born_P
            log_weight_P = np.where(age_P >= 0, log_weight_P + 2.0 * np.exp(-age_P / 10) * (self.born_P > 0), -np.inf)
        if law == "seasonal":
            weekday_P = np.cos(2 * np.pi * (day - self.category_P) / 7)
            feast_P = (self.category_P % 3 == 0) & (day > 7) & (day % 28 < 3)
            log_weight_P = log_weight_P + 1.5 * weekday_P + 2.0 * feast_P
        if law == "moving":
            age_P = day - self.born_P
            log_weight_P = log_weight_P + self.walk_PT[:, int(min(day, DAYS - 1))]
            log_weight_P = np.where(age_P >= 0, log_weight_P + 2.5 * np.exp(-age_P / 5) * (self.born_P > 0), -np.inf)
        if law in ("moving", "branded"):  # the shares are of groups as wholes
            group_P = self.z_PD.argmax(axis=1)
            total_G = np.maximum(np.bincount(group_P, np.exp(log_weight_P)), 1e-300)  # a group may have nothing yet
            log_weight_P = log_weight_P - np.log(total_G)[group_P]
        return log_weight_P


def log_odds(shop: Shop, law: Law, day: float) -> Float64:
    """Compute the law's log-odds of every user and product at a time, float64 [U, P], without visit effects."""
    return _TASTE * (shop.u_UD @ shop.z_PD.T) + shop.log_weights(law, day)


def shop_of(law: Law, *, products: int, users: int, seed: int) -> Shop:
    """Draw a shop with 40 categories and one brand per about 25 products."""
    rng = np.random.default_rng(seed)
    categories, brands = 24 if law == "moving" else 40, max(8, products // 25)

    def vectors(rows: int) -> Float64:
        return rng.standard_normal((rows, DIMS)) / np.sqrt(DIMS)

    category_P = rng.choice(categories, products, p=rng.dirichlet(np.ones(categories)))
    home_B = rng.integers(0, categories, brands)
    by_category = [np.flatnonzero(home_B == category) for category in range(categories)]
    brand_P = np.array([
        rng.choice(by_category[category]) if len(by_category[category]) else rng.integers(brands)
        for category in category_P
    ])  # fmt: skip
    z_PD = 0.7 * vectors(categories)[category_P] + 0.45 * vectors(brands)[brand_P] + 0.55 * vectors(products)
    if law == "personal":
        z_PD = vectors(products)
    favourites_U3 = rng.integers(0, products, (users, 3))
    u_UD = 0.5 * vectors(users) + (rng.dirichlet(np.ones(3), users)[:, :, None] * z_PD[favourites_U3]).sum(axis=1)
    u_UD = u_UD / np.linalg.norm(u_UD, axis=1, keepdims=True)
    rank_P = rng.permutation(products)
    late = rng.random(products) < (1 / 3 if law in _BORN else 0)
    walk_PT = np.zeros((products, DAYS))
    if law in ("moving", "branded"):
        groups, group_P = (categories, category_P) if law == "moving" else (brands, brand_P)
        z_PD = np.eye(groups)[group_P]
        u_UD = np.log(rng.dirichlet(np.full(groups, _SHARE), users) + 1e-6) / _TASTE
    if law == "moving":
        walk_PT = rng.normal(0, _STEP, walk_PT.shape).cumsum(axis=1)
    return Shop(
        z_PD,
        u_UD,
        category_P,
        brand_P,
        rng.normal(3, 0.5, categories)[category_P] + 0.4 * rng.standard_normal(products),
        -0.9 * np.log(rank_P + 10.0),
        np.where(late, rng.uniform(1, DAYS, products), 0.0),
        rng.uniform(-10, DAYS + 10, products),
        walk_PT,
        rng.dirichlet(rng.lognormal(0, 1, users) + 1e-3),
    )


def events_of(shop: Shop, law: Law, *, events: int, seed: int) -> tuple[Int64, Int64, Float64]:
    """Draw users, products and days of about `events` events, by time: int64 [N], int64 [N], float64 [N].

    A user comes in visits of 1 to 12 events. Only with `sessions` do the events of a visit depend on each other.
    """
    rng = np.random.default_rng(seed + 1)
    users, products, days = [], [], []
    unit_PD = shop.z_PD / np.linalg.norm(shop.z_PD, axis=1, keepdims=True)
    for user, count in enumerate(rng.multinomial(events, shop.activity_U)):
        taste_P = _TASTE * (shop.z_PD @ shop.u_UD[user])
        while count > 0:
            length = min(count, int(rng.geometric(0.25)), 12)
            count -= length
            day = rng.uniform(0, DAYS)
            logits_P = taste_P + shop.log_weights(law, day)
            before: int | None = None
            for step in range(length):
                at_P = logits_P
                if before is not None and law == "sessions":
                    at_P = logits_P + _NEXT * unit_PD @ unit_PD[before]
                    at_P = at_P + _VISIT * (shop.category_P == shop.category_P[before])
                odds_P = np.exp(at_P - at_P.max()).cumsum()
                before = int(np.searchsorted(odds_P, rng.random() * odds_P[-1]))
                users.append(user)
                products.append(before)
                days.append(day + step / 1440)
    order = np.argsort(days, kind="stable")
    return np.array(users)[order], np.array(products)[order], np.array(days)[order]


def write(target: Path, law: Law, *, products: int, users: int, events: int, seed: int = 0) -> None:
    """Write `events.parquet`, `products.parquet` and `users.parquet` into a new folder.

    Raises:
        BundleExistsError: the folder is there.
    """
    shop = shop_of(law, products=products, users=users, seed=seed)
    user_N, product_N, day_N = events_of(shop, law, events=events, seed=seed)
    rng = np.random.default_rng(seed + 2)
    kinds = np.array(["view", "cart", "purchase"])
    time_N = START + (day_N * 86_400).astype("timedelta64[s]")
    with atomic_directory(target) as working:
        pq.write_table(
            pa.table({
                "user_id": _names("u", user_N), "product_id": _names("p", product_N),
                "event": pa.array(kinds[rng.choice(3, len(user_N), p=(0.85, 0.1, 0.05))]), "time": pa.array(time_N),
            }),
            working / "events.parquet",
        )  # fmt: skip
        born = pa.array(START + (shop.born_P * 86_400).astype("timedelta64[s]"), mask=shop.born_P == 0)
        listed = {"listed_at": born} if law in _BORN else {}
        columns: dict[str, pa.Array] = {}
        if law not in _PLAIN:
            pictures = pa.FixedSizeListArray.from_arrays(pa.array(_pictures(shop, rng).ravel()), PICTURE)
            columns = {"title": pa.array(_titles(shop, rng)), "picture": pictures}
        pq.write_table(
            pa.table({
                "product_id": _names("p", np.arange(products)),
                "category": _names("c", shop.category_P), "brand": _names("b", shop.brand_P),
                "price": pa.array(np.exp(shop.log_price_P).round(2)), **listed, **columns,
            }),
            working / "products.parquet",
        )  # fmt: skip
        country_U = rng.choice(12, users, p=rng.dirichlet(np.ones(12)))
        pq.write_table(
            pa.table({"user_id": _names("u", np.arange(users)), "country": _names("country", country_U)}),
            working / "users.parquet",
        )


def _pictures(shop: Shop, rng: np.random.Generator) -> Float32:
    """Draw a noisy linear projection of z, with equal signal and noise, float32 [P, 32]."""
    told_PD = shop.z_PD + 0.25 * rng.standard_normal(shop.z_PD.shape)
    picture_PK: Float32 = (told_PD @ rng.standard_normal((DIMS, PICTURE)) / np.sqrt(DIMS)).astype(np.float32)
    return picture_PK


def _titles(shop: Shop, rng: np.random.Generator) -> npt.NDArray[np.str_]:
    """Draw titles: three of the category's twelve words, the brand's name and a random word."""
    rows = len(shop.category_P)
    words = [
        np.char.add(np.char.add("w", (12 * shop.category_P + rng.integers(0, 12, rows)).astype(str)), " ")
        for _ in range(3)
    ]
    brand = np.char.add(np.char.add("brand", shop.brand_P.astype(str)), " ")
    noise = np.char.add("x", rng.integers(0, 500, rows).astype(str))
    title: npt.NDArray[np.str_] = np.char.add(
        np.char.add(words[0], words[1]), np.char.add(words[2], np.char.add(brand, noise))
    )
    return title


def _names(letter: str, numbers_N: Int64) -> pa.Array:
    return pa.array(np.char.add(letter, numbers_N.astype(str)))
