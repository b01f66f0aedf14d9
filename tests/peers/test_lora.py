"""Adapters of PEFT on a frozen model: products are exact, linearised, and of adapters alone."""

import sys

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import ritz

try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    # Built for CUDA beside torch for the CPU, it fails, and transformers with it. Both do without.
    sys.modules["torchvision"] = None

import peft
import transformers

KINDS = {
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=17, n_positions=6, n_embd=8, n_layer=1, n_head=2, bos_token_id=0,
                eos_token_id=0,
            )
        ),
        ["c_attn"],
    ),
    "llama": (
        lambda: transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=17, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
                num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=6,
            )
        ),
        ["q_proj", "v_proj"],
    ),
}  # fmt: skip


def adapted(kind):
    make, modules = KINDS[kind]
    config = peft.LoraConfig(
        r=2, target_modules=modules, lora_dropout=0.1, fan_in_fan_out=kind == "gpt2"
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = peft.get_peft_model(make().double(), config).eval()
        for weight in model.parameters():
            if weight.requires_grad:  # the second factor is zero at first
                torch.nn.init.normal_(weight, std=0.3)
    return model


def batch():
    rng = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 17, (3, 6), generator=rng)
    mask = torch.ones_like(ids)
    mask[0, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def dense_hessian(model, data):
    weights = [weight for weight in model.parameters() if weight.requires_grad]

    def flat(parts):
        return torch.cat([part.flatten() for part in parts])

    with sdpa_kernel(SDPBackend.MATH):
        gradient = flat(torch.autograd.grad(model(**data).loss, weights, create_graph=True))
        rows = [flat(torch.autograd.grad(entry, weights, retain_graph=True)) for entry in gradient]
    return torch.stack(rows)


@pytest.mark.filterwarnings("ignore")  # of PEFT and transformers about their own configurations
@pytest.mark.parametrize("kind", KINDS)
def test_the_hessian_of_adapters_is_exact_and_linearised(kind):
    model, data = adapted(kind), batch()
    risk = ritz.Risk(model, None, [data])
    op, unit = ritz.hessian(risk), torch.eye(risk.space.size, dtype=torch.float64)

    found, expected = op @ unit, dense_hessian(model, data)

    assert all("lora" in name for name in risk.space.shapes)
    assert op.products.plan == "forward over reverse, linearized"
    # These models compute losses and norms in float32, whatever the dtype of their weights.
    assert float((found - expected).norm()) < 1e-5 * float(expected.norm())
    exact = float(ritz.trace(ritz.ggn(risk)).mean)
    assert exact == pytest.approx(float((ritz.ggn(risk) @ unit).trace()), rel=1e-6)
