"""Stock Hugging Face models: products are linearised and exact, and the loss is recognised."""

import warnings

import pytest
import torch
from torch.nn.functional import cross_entropy

import ritz

transformers = pytest.importorskip("transformers")

VOCABULARY, TOKENS, WIDTH = 17, 6, 8
SIZES = {"hidden_size": WIDTH, "intermediate_size": 12, "num_hidden_layers": 1,
         "num_attention_heads": 2}  # fmt: skip
TEXT = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": TOKENS}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}


def build(name):
    """Return a tiny model with random weights in float64, with attention as it comes."""
    if name == "gpt2":
        config = transformers.GPT2Config(vocab_size=VOCABULARY, n_positions=TOKENS, n_embd=WIDTH,
                                         n_layer=1, n_head=2, **SPECIAL)  # fmt: skip
        kind = transformers.GPT2LMHeadModel
    elif name == "llama":  # grouped queries and rotary positions
        config = transformers.LlamaConfig(num_key_value_heads=1, **TEXT, **SPECIAL)
        kind = transformers.LlamaForCausalLM
    elif name == "mixtral":
        config = transformers.MixtralConfig(num_key_value_heads=1, num_local_experts=2, **TEXT,
                                            **SPECIAL)  # fmt: skip
        kind = transformers.MixtralForCausalLM
    elif name == "bert":
        config = transformers.BertConfig(**TEXT, **SPECIAL)
        kind = transformers.BertForMaskedLM
    elif name == "t5":
        config = transformers.T5Config(vocab_size=VOCABULARY, d_model=WIDTH, d_ff=12, d_kv=4,
                                       num_layers=1, num_heads=2, decoder_start_token_id=0,
                                       **SPECIAL)  # fmt: skip
        kind = transformers.T5ForConditionalGeneration
    else:
        config = transformers.ViTConfig(image_size=8, patch_size=4, num_labels=3, **SIZES)
        kind = transformers.ViTForImageClassification
    with torch.random.fork_rng(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        model = kind(config).eval()
        for weight in model.parameters():
            # The default initial weights are so small that the attention is uniform.
            torch.nn.init.normal_(weight, std=0.3)
    # The expert layers of torch have no float64.
    return model if name == "mixtral" else model.double()


def batch_for(name, *, ignored=2, count=3, seed=0):
    rng = torch.Generator().manual_seed(seed)
    if name == "vit":
        images = torch.randn(count, 3, 8, 8, generator=rng, dtype=torch.float64)
        return {"pixel_values": images, "labels": torch.arange(count) % 3}
    ids = torch.randint(1, VOCABULARY, (count, TOKENS), generator=rng)
    mask = torch.ones_like(ids)
    mask[0, TOKENS - ignored :] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def double_backward(model, batch, vector):
    """Return the Hessian-vector product by torch alone."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        loss = model(**batch).loss
        first = torch.autograd.grad(loss, weights, create_graph=True)
        along = vector.split([weight.numel() for weight in weights])
        pairs = zip(first, along, strict=True)
        scalar = sum((gradient.flatten() * part).sum() for gradient, part in pairs)
        product = torch.autograd.grad(scalar, weights)
    return torch.cat([part.flatten() for part in product])


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "bert", "t5", "vit"])
def test_hessian_products_of_stock_models_are_linearised_and_exact(name, rng):
    model, batch = build(name), batch_for(name)
    op = ritz.hessian(ritz.Risk(model, None, [batch]))
    vector = torch.randn(op.shape[0], generator=rng, dtype=op.dtype)

    product = op @ vector

    # Losses are computed in float32 by most of these models, whatever the dtype of the weights.
    expected = double_backward(model, batch, vector)
    rtol = 1e-5 if op.dtype == torch.float64 else 1e-4
    assert float((product - expected).norm()) < rtol * float(expected.norm())
    assert "linearized" in op.products.plan
    assert "not linearized" not in op.products.plan


@pytest.mark.parametrize(("name", "shift"), [("gpt2", True), ("bert", False)])
def test_the_gauss_newton_matrix_is_that_of_a_written_loss(name, shift):
    model, batch = build(name), batch_for(name)

    def forward(model, batch):
        labels = batch["labels"]
        if shift:  # the last token predicts nothing
            labels = torch.nn.functional.pad(labels[:, 1:], (0, 1), value=-100)
        return model(**batch).logits.movedim(-1, 1), labels

    own = ritz.Risk(model, None, [batch])
    written = ritz.Risk(model, cross_entropy, [batch], forward=forward)
    vector = torch.linspace(-1, 1, own.space.size, dtype=torch.float64)

    assert abs(own.loss() - written.loss()) < 1e-12
    torch.testing.assert_close(ritz.ggn(own) @ vector, ritz.ggn(written) @ vector)
    torch.testing.assert_close(ritz.fisher(own) @ vector, ritz.fisher(written) @ vector)


def test_batches_are_weighted_by_the_labels_that_are_not_ignored():
    model = build("gpt2")
    batches = [batch_for("gpt2", ignored=1), batch_for("gpt2", ignored=4, count=2, seed=1)]
    losses, counts = [], []
    for batch in batches:
        losses.append(float(model(**batch).loss.detach()))
        counts.append(int((batch["labels"][:, 1:] != -100).sum()))

    risk = ritz.Risk(model, None, batches)

    mean = sum(a * b for a, b in zip(losses, counts, strict=True)) / sum(counts)
    assert abs(risk.loss() - mean) < 1e-6
    assert risk.num_samples == sum(counts)
    assert "labels" in repr(risk)
    text = str(ritz.sharpness(risk, num_steps=2, num_probes=2, matrix="ggn"))
    assert f"{sum(counts)} labels that are not ignored in batches" in text


def test_a_loss_that_is_not_recognised_is_used_as_it_is():
    class Weighted(torch.nn.Module):
        def __init__(self, model):
            super().__init__()
            self.inner = model

        def forward(self, **batch):
            outputs = self.inner(**batch)
            outputs.loss = 2 * outputs.loss  # not the cross-entropy of the logits
            return outputs

    model, batch = build("gpt2"), batch_for("gpt2")
    risk = ritz.Risk(Weighted(model), None, [batch])

    assert abs(risk.loss() - 2 * float(model(**batch).loss.detach())) < 1e-6
    with pytest.raises(ValueError, match="separate from the loss"):
        ritz.ggn(risk)


def assert_is_mean_over_tokens(product, model, batches, vector):
    counts = [int((batch["labels"][:, 1:] != -100).sum()) for batch in batches]
    expected = sum(
        count / sum(counts) * double_backward(model, batch, vector)
        for count, batch in zip(counts, batches, strict=True)
    )
    assert float((product - expected).norm()) < 1e-5 * float(expected.norm())


def test_padded_and_full_batches_share_one_operator():
    model = build("gpt2")
    batches = [batch_for("gpt2", ignored=0), batch_for("gpt2", ignored=3, seed=1)]
    op = ritz.hessian(ritz.Risk(model, None, batches))
    vector = torch.linspace(-1, 1, op.shape[0], dtype=torch.float64)

    product = op @ vector

    assert_is_mean_over_tokens(product, model, batches, vector)
    assert "not linearized" not in op.products.plan


def test_texts_of_many_lengths_are_exact_and_the_warning_says_how_to_pad():
    model = build("gpt2")
    batches = []
    for length in range(2, TOKENS + 1):  # five lengths, by two numbers of texts
        for count in (2, 3):
            batch = batch_for("gpt2", ignored=0, count=count, seed=length)
            batches.append({key: value[:, :length] for key, value in batch.items()})
    op = ritz.hessian(ritz.Risk(model, None, batches))
    vector = torch.linspace(-1, 1, op.shape[0], dtype=torch.float64)

    with pytest.warns(UserWarning, match="Pad the batches to a few lengths"):
        product = op @ vector

    assert_is_mean_over_tokens(product, model, batches, vector)
