import pytest

from ritz._core.registry import Registry, UnknownNameError


@pytest.fixture
def fruit():
    registry = Registry[int]("fruit")
    for number, name in enumerate(["pear", "apple", "apricot"]):
        registry.register(name)(number)
    return registry


def test_names_come_sorted(fruit):
    assert list(fruit) == ["apple", "apricot", "pear"]
    assert len(fruit) == 3
    assert "pear" in fruit
    assert fruit["apricot"] == 2


def test_a_wrong_name_is_answered_with_the_nearest(fruit):
    with pytest.raises(UnknownNameError) as caught:
        fruit["aple"]
    assert str(caught.value) == "no fruit is named 'aple'; did you mean apple?"
    with pytest.raises(KeyError, match="known: apple, apricot, pear"):
        fruit["zzz"]


def test_a_name_is_taken_once(fruit):
    with pytest.raises(ValueError, match="the fruit 'pear' is registered already"):
        fruit.register("pear")(3)
