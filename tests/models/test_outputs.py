"""What every model computes, at weights by formula."""

import pytest
import torch
from models.tiny import sample, tiny, wave

from ritz import models

# Sum of outputs times a wave, in train and eval mode. A changed architecture changes them.
CHECKSUMS = {
    "alexnet": (-1.341211018348, -1.341211018348),
    "allcnn": (-0.03536351111775, -0.03536351111775),
    "gpt": (-1.990357014085, -1.990357014085),
    "gpt2": (-1.990357014085, -1.990357014085),
    "lenet": (-0.9842501943198, -0.9842501943198),
    "logistic": (2.075164961724, 2.075164961724),
    "lstm": (0.5478750962943, 0.5478750962943),
    "mlp": (2.108708392791, 2.108708392791),
    "preresnet110": (0.09153125101903, -3.422491476079),
    "preresnet164": (-0.5145916047068, -0.2260321426371),
    "preresnet20": (-1.047836369868, 1.401338594121),
    "preresnet56": (-0.6253614341034, 0.3679920908292),
    "preresnet8": (-0.1692354826796, -0.07983774743417),
    "preresnet83": (0.3858465293162, 1.854809152731),
    "resnet18": (-0.7681569278719, -0.9127256879948),
    "resnet20": (-5.264580981239, -1.286415495248),
    "resnet44": (6.392573004417, -33.24053554295),
    "resnet44x2": (20.30732203107, -526.1652346021),
    "resnet50": (1.150497097238, 22.75367727663),
    "resnet56": (2.790761933211, 269.4501481183),
    "resnext29_8x64": (-0.8269460345442, -1.156553967392),
    "vgg11": (0.593645335407, 0.593645335407),
    "vgg11_bn": (1.485200118267, 0.5066778107731),
    "vgg13": (0.7566124836688, 0.7566124836688),
    "vgg13_bn": (2.01898571935, 1.202575526991),
    "vgg16": (0.188613156525, 0.188613156525),
    "vgg16_bn": (0.6758996371436, 1.306884529817),
    "vgg19": (0.5431749205615, 0.5431749205615),
    "vgg19_bn": (0.2551414318663, 1.78771121509),
    "vgg6": (0.2841646945147, 0.2841646945147),
    "vgg6_bn": (0.2954167903453, 0.4006482733048),
    "wideresnet16x4": (-0.4400443549534, -5.826165659908),
    "wideresnet28x10": (1.136216679434, -36.11113691219),
}


def checksum(outputs):
    return float((outputs * wave(*outputs.shape)).sum())


@pytest.mark.parametrize("name", models.available())
def test_outputs_equal_the_recorded_checksums(name):
    model, (inputs, _) = tiny(name), sample(name)
    found = []
    for training in (True, False):
        outputs = model.train(training)(inputs)
        assert torch.isfinite(outputs).all()
        assert outputs.dtype == torch.float64
        assert outputs.std(0).max() > 0.01  # the inputs matter
        found.append(checksum(outputs.detach()))
    # Roundoff of float64, times what a hundred layers may make of it.
    assert found == pytest.approx(CHECKSUMS[name], rel=1e-8, abs=1e-10)
