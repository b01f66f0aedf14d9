import pytest

from ritz._core.registry import Registry, UnknownNameError


@pytest.fixture
def fruit():
    registry = Registry[int]("fruit")
    for number, name in enumerate(["pear", "apple", "apricot"]):
        registry.register(name)(number)
    return registry


def test_names_are_sorted(fruit):
    assert list(fruit) == ["apple", "apricot", "pear"]
    assert "pear" in fruit
    assert fruit["apricot"] == 2


def test_an_unknown_name_suggests_similar_names(fruit):
    with pytest.raises(UnknownNameError) as caught:
        fruit["aple"]
    assert str(caught.value) == "no fruit is named 'aple'; did you mean apple?"
    with pytest.raises(KeyError, match="known: apple, apricot, pear"):
        fruit["zzz"]


def test_an_unknown_name_refers_to_the_command_that_lists_a_long_registry():
    registry = Registry[int]("preset", listing="ritz list optimizers")
    for name in ("gadam/vgg16/cifar10", "gadam/lstm/ptb", "sgd/vgg16/cifar10"):
        registry.register(name)(0)

    with pytest.raises(UnknownNameError, match="no preset is named 'zzz'; see ritz list optimi"):
        registry["zzz"]
    # A part of a name is no near match of it by its characters.
    with pytest.raises(UnknownNameError, match="did you mean gadam/lstm/ptb or gadam/vgg16/cifar"):
        registry["Gadam"]


def test_registering_a_name_twice_raises(fruit):
    with pytest.raises(ValueError, match="the fruit 'pear' is registered already"):
        fruit.register("pear")(3)


@pytest.mark.parametrize("name", ["Red-Currant", "red_currant", "redcurrant", "RED-CURRANT"])
def test_find_ignores_case_hyphens_and_underscores(fruit, name):
    fruit.register("red_currant")(7)
    assert fruit.find(name) == 7
    with pytest.raises(UnknownNameError, match="no fruit is named 'A-ple'; did you mean apple"):
        fruit.find("A-ple")  # as it was typed


def test_find_rejects_an_ambiguous_name_but_accepts_exact_ones(fruit):
    fruit.register("pe_ar")(8)
    assert (fruit.find("pear"), fruit.find("pe_ar")) == (0, 8)
    with pytest.raises(
        UnknownNameError, match="no fruit is named 'pe-ar'; did you mean pear or pe_ar"
    ):
        fruit.find("pe-ar")
