import pytest

from longtail.bundle import hash_token, tokenize


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Toy Story (1995)", ["toy", "story", "1995"]),
        ("L'Étoile—ÜBER_alles", ["l", "étoile", "über_alles"]),
        (" \t…", []),
    ],
)
def test_words_are_lower_cased_runs_of_word_characters(text: str, words: list[str]) -> None:
    assert tokenize(text) == words


def test_a_token_hashes_to_the_row_that_it_always_has() -> None:
    published_crc32_of_123456789 = 0xCBF43926

    assert hash_token("123456789", 1000) == 1 + published_crc32_of_123456789 % 999
    assert hash_token("étoile", 65536) == 31956


def test_no_token_hashes_to_the_out_of_vocabulary_row_or_past_the_table() -> None:
    rows = {hash_token(str(number), 5) for number in range(200)}

    assert rows == {1, 2, 3, 4}
    assert hash_token("anything", 2) == 1
