"""Models by name: counts, first weights, options and errors."""

import copy
import re

import pytest
import torch
from models.tiny import WORDS, options, sample, tiny
from torch import nn

from ritz import models
from ritz._core.registry import UnknownNameError
from ritz.models._initial_weights import draw_weights

# Published figures stand with their source; the others follow from the architectures.
COUNTS = [
    ("logistic", 10, 7_850),  # Granziol, Flatness, section 5; thesis 6.4
    ("lenet", 10, 61_706),  # the usual figure for LeNet-5
    ("alexnet", 10, 2_472_266),  # 2.47M
    ("alexnet", 100, 2_495_396),
    ("allcnn", 100, 1_387_108),  # Granziol, Flatness, section 5
    ("allcnn", 10, 1_369_738),  # 1.37M: Springenberg et al., Table 3 has 1.4M
    ("vgg6", 100, 4_487_396),
    ("vgg11", 100, 9_797_092),
    ("vgg11_bn", 100, 9_802_596),
    ("vgg13", 100, 9_981_604),
    ("vgg13_bn", 100, 9_987_492),
    ("vgg16", 100, 15_291_300),  # Granziol, thesis, 4.6.1
    ("vgg16_bn", 100, 15_299_748),
    ("vgg19", 100, 20_600_996),
    ("vgg19_bn", 100, 20_612_004),
    ("resnet20", 10, 269_722),  # 0.27M: He et al., Table 6
    ("resnet44", 10, 658_586),  # 0.66M
    ("resnet56", 10, 853_018),  # 0.85M
    ("resnet44x2", 100, 2_637_444),
    ("preresnet8", 100, 83_700),
    ("preresnet110", 100, 1_169_972),
    ("preresnet164", 100, 1_726_388),  # Granziol, Flatness, section 5
    ("wideresnet16x4", 10, 2_751_146),
    ("wideresnet28x10", 100, 36_546_980),
    ("resnext29_8x64", 10, 34_426_698),  # 34.4M: Xie et al., Table 7
    ("resnext29_8x64", 100, 34_518_948),
    ("resnet18", 1000, 11_689_512),  # torchvision
    ("resnet50", 1000, 25_557_032),  # torchvision
    ("lstm", 10_000, 24_221_600),  # 24M: Merity et al., Table 1
    ("gpt2", 50_257, 124_439_808),
    ("gpt", 65, 10_770_816),
]


def count(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize(("name", "num_classes", "expected"), COUNTS)
def test_models_have_their_published_number_of_parameters(name, num_classes, expected):
    assert count(models.create(name, num_classes=num_classes, device="meta")) == expected


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("mlp", {"hidden": (10, 100)}, 9_960),  # Granziol, Flatness, section 5
        ("mlp", {"hidden": 10}, 785 * 10 + 11 * 10),
        ("preresnet110", {"block": "basic", "num_classes": 10}, 1_730_522),  # 1.7M: He et al.
        ("lstm", {"tied": False}, 43_827_600),
    ],
)
def test_options_change_the_number_of_parameters(name, changes, expected):
    assert count(models.create(name, device="meta", **changes)) == expected


@pytest.mark.parametrize("name", models.available())
def test_outputs_have_one_score_per_class(name):
    model = models.create(name, num_classes=7, device="meta")
    if name in WORDS:
        inputs, shape = torch.zeros(2, 11, dtype=torch.long, device="meta"), (2, 7, 11)
    else:
        sides = {"logistic": 28, "mlp": 28, "lenet": 28, "resnet18": 224, "resnet50": 224}
        side = sides.get(name, 32)
        channels = 1 if side == 28 else 3
        inputs, shape = torch.empty(2, channels, side, side, device="meta"), (2, 7)
    for training in (True, False):
        assert model.train(training)(inputs).shape == shape


@pytest.mark.parametrize("name", models.available())
def test_a_state_dict_loads_into_another_copy_of_the_model(name):
    model, (inputs, _) = tiny(name), sample(name)
    other = models.create(name, num_classes=3, dtype=torch.float64, **options(name))
    assert not torch.equal(other.eval()(inputs), model.eval()(inputs))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(inputs), model(inputs))


@pytest.mark.parametrize("name", models.available())
def test_initial_weights_are_finite_and_reproducible(name):
    given = options(name) | {"num_classes": 3}
    before = torch.random.get_rng_state()
    first, again = (models.create(name, **given) for _ in range(2))
    other = models.create(name, generator=torch.Generator().manual_seed(1), **given)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert first.training
    states = first.state_dict(), again.state_dict(), other.state_dict()
    assert all(torch.isfinite(value).all() for value in states[0].values())
    assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    assert any(not torch.equal(value, states[2][key]) for key, value in states[0].items())
    double = models.create(name, dtype=torch.float64, **given).state_dict()
    assert all(torch.equal(value, double[key].to(value)) for key, value in states[0].items())


@pytest.mark.parametrize(
    ("name", "layer", "expected"),
    [
        ("vgg11_bn", "features.4", (2 / (9 * 128)) ** 0.5),
        ("preresnet8", "layer3.0.conv2", (2 / (9 * 64)) ** 0.5),
        ("resnet44", "layer3.0.conv2", (2 / (9 * 64)) ** 0.5),
        ("wideresnet16x4", "layer1.1.conv1", (2 / (9 * 64)) ** 0.5),
        ("allcnn", "8", (2 / (9 * (96 + 192))) ** 0.5),
        ("vgg11", "classifier.1", (1 / (3 * 512)) ** 0.5),  # of a uniform law
        ("alexnet", "features.6", (1 / (3 * 9 * 192)) ** 0.5),
        ("logistic", "1", (1 / (3 * 784)) ** 0.5),
        ("gpt", "blocks.0.qkv", 0.02),
        ("gpt", "blocks.0.out", 0.02 / 12**0.5),
        ("lstm", "embedding", 0.1 / 3**0.5),
    ],
)
def test_initial_weights_have_the_published_spread(name, layer, expected):
    small = {"num_classes": 20, "width": 100, "hidden": 100} if name == "lstm" else {}
    weight = models.create(name, **small).get_submodule(layer).weight.detach()
    # Four standard errors of a standard deviation of normal numbers, which vary the more.
    error = 4 * expected / (2 * weight.numel()) ** 0.5
    assert abs(float(weight.std()) - expected) < error
    assert abs(float(weight.mean())) < 4 * expected / weight.numel() ** 0.5


@pytest.mark.parametrize(
    ("name", "layer", "expected"),
    [("vgg11", "features.0", 0.0), ("allcnn", "1", 0.1), ("gpt", "blocks.0.up", 0.0),
     ("resnext29_8x64", "fc", 0.0), ("wideresnet16x4", "conv1", 0.0), ("lstm", "head", 0.0)],
)  # fmt: skip
def test_initial_biases_have_the_published_value(name, layer, expected):
    small = options(name) | {"num_classes": 3}
    bias = models.create(name, **small).get_submodule(layer).bias
    assert torch.equal(bias, torch.full_like(bias, expected))


@pytest.mark.parametrize(
    ("name", "expected"),
    [("VGG16-BN", "vgg16_bn"), ("vgg16bn", "vgg16_bn"), ("vgg_16", "vgg16"),
     ("resnet-44", "resnet44"), ("ResNet-44", "resnet44"), ("WideResNet-28x10", "wideresnet28x10"),
     ("resnext-29-8x64", "resnext29_8x64")],
)  # fmt: skip
def test_names_ignore_case_hyphens_and_underscores(name, expected):
    assert models.options(name) == models.options(expected)
    found, meant = (models.create(one, num_classes=100, device="meta") for one in (name, expected))
    assert count(found) == count(meant)


def test_the_default_device_and_dtype_are_followed():
    with torch.device("meta"):
        assert next(models.create("mlp").parameters()).is_meta
    assert next(models.create("mlp", dtype=torch.float16).parameters()).dtype == torch.float16


def test_a_layer_without_known_weights_is_refused():
    with pytest.raises(TypeError, match=r"no initial weights are defined for Bilinear.*'weight'"):
        draw_weights(nn.Sequential(nn.Bilinear(1, 1, 1)), torch.Generator())


def test_a_deep_copy_is_independent_of_the_model():
    model = tiny("lstm")
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.embedding.weight.zero_()
    assert not torch.equal(model(sample("lstm")[0]), other(sample("lstm")[0]))


# Errors


def test_an_unknown_name_suggests_the_nearest():
    with pytest.raises(UnknownNameError, match=r"no model is named 'VGG-61'; did you mean vgg6"):
        models.create("VGG-61")
    with pytest.raises(TypeError, match="name must be a string, got int"):
        models.create(16)


def test_a_wrong_option_is_named():
    with pytest.raises(TypeError, match=r"vgg16 has no option 'droput'; it has .*dropout"):
        models.create("vgg16", droput=0.1)
    with pytest.raises(TypeError, match=r"vgg16 has no option 'depth'; it has num_classes, input"):
        models.create("vgg16", depth=11)
    assert "width" in models.options("vgg16")


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        (
            "vgg16",
            {"input_shape": (3, 28, 28)},
            r"input_shape must be \(channels, height, width\) with sides of at least 32",
        ),
        ("vgg16", {"input_shape": (32, 32)}, r"input_shape must be \(channels, height, width\)"),
        ("lenet", {"input_shape": (1, 0, 28)}, "input_shape must be at least 1, got 0"),
        ("vgg16", {"dropout": 1.5}, "dropout must be between 0.0 and 1.0, got 1.5"),
        ("resnet44", {"num_classes": 0}, "num_classes must be at least 1, got 0"),
        ("lenet", {"hidden": 64}, "hidden must be two widths, got 64"),
        ("lenet", {"hidden": (64, 0)}, "hidden must be at least 1, got 0"),
        ("mlp", {"hidden": (0,)}, "hidden must be at least 1, got 0"),
        ("mlp", {"hidden": 0}, "hidden must be at least 1, got 0"),
        ("mlp", {"activation": "rleu"}, "activation must be one of relu, tanh"),
        ("preresnet110", {"block": "wide"}, "block must be one of auto, basic, bottleneck"),
        ("preresnet83", {"block": "basic"}, "block must fit 83 layers, but basic blocks need 6 n"),
        ("lstm", {"weight_drop": -0.1}, "weight_drop must be between"),
        ("lstm", {"depth": 0}, "depth must be at least 1"),
        ("gpt", {"width": 5, "heads": 2}, r"width must be a multiple of heads \(2\), got 5"),
        ("gpt", {"input_shape": (1, 2)}, r"input_shape must be \(length,\)"),
    ],
)
def test_wrong_values_are_named(name, wrong, message):
    with pytest.raises(ValueError, match=message):
        models.create(name, **wrong)


@pytest.mark.parametrize("wrong", ["64", 6.5, ("6",)])
def test_a_width_that_is_no_integer_is_shown_whole(wrong):
    shown = re.escape(repr(wrong[0] if isinstance(wrong, tuple) else wrong))
    with pytest.raises(TypeError, match=f"hidden must be an integer, got {shown}$"):
        models.create("mlp", hidden=wrong)
