import pytest

from rft_batch.equations import equation_key

GSM8K = (
    "Natalia sold 48/2 = <<48/2=24>>24 clips in May. "
    "Natalia sold 48+24 = <<48 + 24 = 72>>72 clips altogether.\n#### 72"
)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (GSM8K, "48/2=24|48+24=72"),
        ("<<1,000*2=2,000>>", "1,000*2=2,000"),
        ("<<2*3=6=12/2>>", "2*3=6=12/2"),
        ("<<-(2+3)*2=-10>>", "-(2+3)*2=-10"),
        ("<<10/3=3.3333>>", "10/3=3.3333"),
        ("<<50*20%=10>> <<20/50=40%>> <<20/50*100=40%>>", "50*20%=10|20/50=40%|20/50*100=40%"),
        ("It is 5 + 4 = 10. <<5+5=10>>", "5+5=10"),
    ],
)
def test_annotations_are_the_key_as_they_are_written(text: str, key: str) -> None:
    assert equation_key(text) == key


@pytest.mark.parametrize(
    "text",
    [
        "<<48/2=25>>", "<<2+2=4>><<2+2=5>>", "<<2*3=6=7>>", "<<10/3=3.33>>", "<<5/0=0>>",
        "<<x=5>>", "<<5>>", "<<>>", "<<2**3=8>>", "<<2^3=8>>", "<<5 3=53>>", "<<7//2=3>>",
        "<<len('abc')=3>>", "<<2=2,>>", "<<(2=2>>", "<<=>>", "<<2+2==>>",
    ],
)  # fmt: skip
def test_an_annotation_that_does_not_hold_bans(text: str) -> None:
    assert equation_key(text) is None


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("So 23 + 8 = 31.", "23+8=31"),
        ("23+8=31 and 31 - 1 = 30", "23+8=31|31-1=30"),
        ("$5.00 \N{MULTIPLICATION SIGN} 3 = $15.00, then 15 ÷ 3 = 5", "5*3=15|15/3=5"),
        ("4 x 5 = 20; 4x5=20; 2·3 = 6", "4*5=20|4*5=20|2*3=6"),
        ("1,000 + 234 = 1,234", "1000+234=1234"),
        ("2 + 3 = 5 = 10/2", "2+3=5|5=10/2"),
        ("2 * (3 + 4) = 14", "2*(3+4)=14"),
        ("(5 + 3 = 8)", "5+3=8"),
        ("Step 2: 5+3=8 apples", "5+3=8"),
        ("1. 5 + 3 = 8\n2) 8 - 2 = 6\n", "5+3=8|8-2=6"),
        ("She has 3 23 + 8 = 31 4 + 5 = 9", "23+8=31|4+5=9"),
        ("speed = 60/2 = 30 mph", "60/2=30"),
        ("50 * 20% = 10, and 20/50 = 40%", "50*20%=10|20/50=40%"),
        ("**5 + 3 = 8**. So 8 - 1 = **7**", "5+3=8|8-1=7"),
        ("\\(5 + 3 = 8\\)", "5+3=8"),
        ("-5 + 3 = -2", "-5+3=-2"),
        ("12 = 3 * 4", "12=3*4"),
    ],
)
def test_equations_in_free_text(text: str, key: str) -> None:
    assert equation_key(text) == key


@pytest.mark.parametrize(
    "text",
    [
        "", "no numbers", "x = 5", "5 = 5", "the total = 7", "2x = 10", "2x + 3 = 9",
        "3 + y = 18", "5 apples + 3 = 8", "12 eggs - 3 eggs = 4 eggs", "x^2 + 1 = 9", "2^3 + 1 = 9",
        "4 + 4 = 2^3", "2**3 = 8", "2 ** 3 + 1 = 9", "1 + 2**3 = 9",
        "a2 + 3 = 9", "3 != 4 + 5", "4 + 5 >= 3", "- 5 + 3 = 8",
        "10 * x = 30", "=", "= 5 + 3", "5 + 3 =", "60 miles/2 = 40", "5 + 3 ≈ 9",
    ],
)  # fmt: skip
def test_what_is_not_arithmetic_is_no_equation(text: str) -> None:
    assert equation_key(text) == ""


@pytest.mark.parametrize("text", ["5 + 4 = 10", "2 + 2 = 4 = 5*1", "so 1,000 - 1 = 99", "7/0 = 7"])
def test_a_wrong_equation_in_free_text_bans(text: str) -> None:
    expected = "" if "/0" in text else None
    assert equation_key(text) == expected


@pytest.mark.parametrize("text", ["23 + 8 = 31", "23+8=31", " 23 +8 = $31.00 ", "23 + 8 = 31.0"])
def test_the_key_does_not_depend_on_how_it_is_written(text: str) -> None:
    assert equation_key(text) == "23+8=31"


HOSTILE = {
    "power": "9**9**9=1",
    "annotated power": "<<9**9**9=1>>",
    "brackets": "(" * 200_000 + "1=1",
    "annotated brackets": "<<" + "(" * 250 + "1" + ")" * 20 + "=1>>",
    "unary": "<<" + "-" * 250 + "1=1>>",
    "huge digits": "1" * 500_000 + "+1=2",
    "huge product": "<<" + "*".join(["9" * 29] * 9) + "=1>>",
    "endless chain": "1+1=" * 20_000 + "2",
    "separators": "1" + ",234" * 50_000 + "5+1=2",
    "angles": "<" * 500_000 + "5=5>>",
    "open annotations": "<<1" * 100_000,
    "spaces": "5" + " " * 300_000 + "x" + " " * 300_000 + "=",
    "times": "5x" * 100_000 + "=1",
    "operators": "1" + "+-*/" * 100_000 + "=1",
    "signs of equality": "=" * 500_000,
    "equalities": "= " * 200_000,
    "code": "<<__import__('os').system('touch hacked')=0>>",
    "attribute": "(1).__class__ + 1 = 2",
    "nul": "1+1\0=2",
    "surrogate": "1+1=2 \ud800",
    "other digits": "\u0663 + \u0664 = \u0667",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_are_harmless(name: str) -> None:
    key = equation_key(HOSTILE[name])
    assert key is None or set(key) <= set("0123456789.e+-*/=|(%)")
