"""Small models of the families that people use, with random weights and data."""

import copy
import sys
import warnings

import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import ritz

VOCABULARY, LENGTH, WIDTH, DEPTH, HEADS = 512, 64, 64, 4, 4


class Logits(nn.Module):
    """A model of Hugging Face as a function of one tensor: logits with classes in axis 1."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        """Tokens ``(batch, length)`` or images to logits."""
        logits = self.model(x).logits
        return logits.transpose(1, 2) if logits.ndim == 3 else logits


def hugging_face(kind, config, **settings):
    """Return a model of transformers with random weights."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        # One that does not fit the installed torch would stop transformers, which can do without.
        sys.modules["torchvision"] = None
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = getattr(transformers, kind)(getattr(transformers, config)(**settings))
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    return Logits(model)


def texts(count=8, length=LENGTH):
    return tuple(torch.randint(1, VOCABULARY, (count, length)) for _ in range(2))


def images(count=16, size=32, classes=10):
    return torch.randn(count, 3, size, size), torch.randint(0, classes, (count,))


def sizes(scale):
    return {"hidden_size": WIDTH * scale, "intermediate_size": 4 * WIDTH * scale,
            "num_hidden_layers": DEPTH, "num_attention_heads": HEADS}  # fmt: skip


def text_sizes(scale):
    return sizes(scale) | {"vocab_size": VOCABULARY, "max_position_embeddings": LENGTH,
                           "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}  # fmt: skip


def gpt2(scale):
    model = hugging_face("GPT2LMHeadModel", "GPT2Config", vocab_size=VOCABULARY,
                         n_positions=LENGTH, n_embd=WIDTH * scale, n_layer=DEPTH, n_head=HEADS,
                         bos_token_id=0, eos_token_id=0)  # fmt: skip
    return model, *texts()


def llama(scale):
    return hugging_face("LlamaForCausalLM", "LlamaConfig", num_key_value_heads=2,
                        **text_sizes(scale)), *texts()  # fmt: skip


def mixtral(scale):
    return hugging_face("MixtralForCausalLM", "MixtralConfig", num_key_value_heads=2,
                        num_local_experts=4, **text_sizes(scale)), *texts()  # fmt: skip


def bert(scale):
    return hugging_face("BertForMaskedLM", "BertConfig", **text_sizes(scale)), *texts()


def vit(scale):
    model = hugging_face("ViTForImageClassification", "ViTConfig", image_size=32, patch_size=4,
                         num_labels=10, **sizes(scale))  # fmt: skip
    return model, *images(8)


class Adapted(nn.Module):
    """A linear layer whose weight is constant, plus a product of two thin matrices (LoRA)."""

    def __init__(self, layer, rank=4):
        super().__init__()
        self.layer = layer
        out, inner = layer.weight.shape if isinstance(layer, nn.Linear) else layer.weight.T.shape
        self.down = nn.Parameter(torch.randn(rank, inner) / inner**0.5)
        self.up = nn.Parameter(0.02 * torch.randn(out, rank))

    def forward(self, x):
        """``(..., inner)`` to ``(..., out)``."""
        return self.layer(x) + x @ self.down.T @ self.up.T


def lora(scale):
    """GPT-2 with adapters at its attention, all other weights constant."""
    model, x, y = gpt2(scale)
    model.requires_grad_(False)
    for block in model.model.transformer.h:
        block.attn.c_attn, block.attn.c_proj = map(Adapted, (block.attn.c_attn, block.attn.c_proj))
    return model, x, y


class Recurrent(nn.Module):
    """An embedding, recurrent layers and a decoder."""

    def __init__(self, kind, width):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.layers = getattr(nn, kind)(width, width, num_layers=2, batch_first=True)
        self.decode = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        """Logits ``(batch, classes, length)``."""
        return self.decode(self.layers(self.embed(tokens))[0]).transpose(1, 2)


def lstm(scale):
    return Recurrent("LSTM", 2 * WIDTH * scale), *texts(16, 20)


def gru(scale):
    return Recurrent("GRU", 2 * WIDTH * scale), *texts(16, 20)


def resnet(scale):
    return ritz.models.create("resnet20", num_classes=10), *images(32 * scale)


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution, a norm and a two-layer perceptron around a shortcut."""

    def __init__(self, width):
        super().__init__()
        self.mix = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.size = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x):
        """``(batch, width, height, width)`` to the same."""
        h = self.norm(self.mix(x).permute(0, 2, 3, 1))
        return x + (self.size * self.down(F.gelu(self.up(h)))).permute(0, 3, 1, 2)


def convnext(scale):
    width = 48 * scale
    model = nn.Sequential(
        nn.Conv2d(3, width, 4, stride=4),
        *(ConvNeXtBlock(width) for _ in range(4)),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.LayerNorm(width),
        nn.Linear(width, 10),
    )
    return model, *images(32)


class Patches(nn.Module):
    """A vision transformer of the layers of torch."""

    def __init__(self, width):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, stride=4)
        self.place = nn.Parameter(0.02 * torch.randn(64, width))
        layer = nn.TransformerEncoderLayer(
            width, HEADS, 4 * width, dropout=0.0, activation="gelu", batch_first=True,
            norm_first=True,
        )  # fmt: skip
        self.layers = nn.ModuleList(copy.deepcopy(layer) for _ in range(DEPTH))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        """Images to logits."""
        x = self.patch(x).flatten(2).transpose(1, 2) + self.place
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def vision(scale):
    return Patches(WIDTH * scale), *images(8)


def decoder(scale):
    shape = {"num_classes": VOCABULARY, "input_shape": (LENGTH,)}
    model = ritz.models.create("gpt", **shape, width=WIDTH * scale, heads=HEADS)
    return model, *texts()


def compiled(scale):
    model, x, y = decoder(scale)
    return torch.compile(model), x, y


# Each takes a factor of its width, and returns a model, its inputs and its targets.
MODELS = {
    "GPT-2, Hugging Face": gpt2,
    "Llama, Hugging Face": llama,
    "BERT, Hugging Face": bert,
    "ViT, Hugging Face": vit,
    "Mixtral (experts)": mixtral,
    "GPT-2 with LoRA": lora,
    "LSTM": lstm,
    "GRU": gru,
    "ResNet-20": resnet,
    "ConvNeXt": convnext,
    "ViT of torch": vision,
    "GPT, 6 layers": decoder,
    "GPT, torch.compile": compiled,
}
