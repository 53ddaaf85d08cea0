from unicodedata import normalize

import pytest

from longtail.bundle.vocabulary import hash_token, tokenize


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Toy Story (1995)", ["toy", "story", "1995"]),
        ("L'Étoile—ÜBER_alles", ["l", "étoile", "über_alles"]),
        (" \t…", []),
        # Marks and joiners belong to words.
        ("हिन्दी किताब", ["हिन्दी", "किताब"]),
        ("தமிழ், తెలుగు; বাংলা", ["தமிழ்", "తెలుగు", "বাংলা"]),
        ("ภาษาไทย หนังสือ", ["ภาษาไทย", "หนังสือ"]),
        ("שָׁלוֹם מُحَمَّد", ["שָׁלוֹם", "מُحَمَّد"]),
        ("می\u200cخواهم", ["می\u200cخواهم"]),
        ("क्\u200dष \u200d।", ["क्\u200dष"]),
        ("İstanbul", ["i\u0307stanbul"]),
        # So do a final plus and hash.
        ("C++ primer", ["c++", "primer"]),
        ("C# primer, F#", ["c#", "primer", "f#"]),
        ("C++17 (C)", ["c++", "17", "c"]),
        ("Disney+ 18+", ["disney+", "18+"]),
        ("Romeo + Juliet, Q+A, No #5, #1, 1#2", ["romeo", "juliet", "q", "a", "no", "5", "1", "1", "2"]),
        # An emoji is no word.
        ("I ❤\ufe0f this 👨\u200d👩\u200d👧", ["i", "this"]),
    ],
)
def test_text_is_split_into_words(text: str, words: list[str]) -> None:
    assert tokenize(text) == words


@pytest.mark.parametrize("text", ["Café Müller", "İzmir", "ÅNGSTRÖM", "한국어", "が", "नुक़्ता", "Việt Nam"])
def test_composed_and_decomposed_texts_have_the_same_words(text: str) -> None:
    assert tokenize(normalize("NFD", text)) == tokenize(normalize("NFC", text))


def test_token_hash_is_stable() -> None:
    published_crc32_of_123456789 = 0xCBF43926

    assert hash_token("123456789", 1000) == 1 + published_crc32_of_123456789 % 999
    assert hash_token("étoile", 65536) == 31956


def test_no_token_hashes_to_the_out_of_vocabulary_row_or_past_the_table() -> None:
    rows = {hash_token(str(number), 5) for number in range(200)}

    assert rows == {1, 2, 3, 4}
    assert hash_token("anything", 2) == 1
