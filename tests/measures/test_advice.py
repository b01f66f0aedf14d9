import json
import math
from dataclasses import fields, replace
from functools import partial

import pytest
import torch
from curvature.networks import seeded
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Adam

from ritz._core.results import Estimate
from ritz._core.storage import to_json
from ritz.curvature import Risk, curvature_operator, hessian
from ritz.measures import advice_cost, advise, stable_rate
from ritz.measures._advice_result import advice_sentence
from ritz.measures._preconditioned import divisors, preconditioned_curvature

N = 96
SIZES = (4, 16, 96)


def network(*, norm=False):
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(6)] if norm else []
    return nn.Sequential(nn.Linear(5, 6), *middle, nn.Tanh(), nn.Linear(6, 3)).double()


def samples():
    x = torch.randn(N, 5, generator=seeded(0), dtype=torch.float64)
    return x, (x @ torch.randn(5, 3, generator=seeded(1), dtype=torch.float64)).argmax(1)


def sgd(params):
    return SGD(params, lr=0.2)


def trained(make=sgd, steps=150, **options):
    model, (x, y) = network(**options), samples()
    optimizer = make(model.parameters())
    for step in range(steps):
        rows = torch.randperm(N, generator=seeded(step))[:32]
        optimizer.zero_grad()
        functional.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
    return Risk(model, functional.cross_entropy, samples()), optimizer


@pytest.fixture(scope="module")
def risk():
    return trained()[0]


@pytest.fixture(scope="module")
def advice(risk):
    return advise(risk, batch_sizes=SIZES, known=(16, 0.2))


def test_the_figures_of_all_data_are_those_of_the_dense_matrix(risk, advice):
    values = torch.linalg.eigvalsh(curvature_operator(risk, "hessian").dense())

    assert float(advice.prediction.lambda_max) == pytest.approx(float(values[-1]))
    assert float(advice.smallest) == pytest.approx(float(values[0]))
    # At the batch of all data, there is no noise.
    assert float(advice.edge.mean[-1]) == pytest.approx(2 / float(values[-1]))
    assert float(advice.rate.mean[-1]) == pytest.approx(2 / float(values[-1]), rel=1e-4)
    assert float(advice.damping.mean[-1]) == 0
    assert advice.loss == risk.loss()


def test_advice_is_about_samples_if_batches_are_weighted_by_their_tokens(risk, advice):
    by_token = Risk(risk.model, risk.loss_fn, samples(), count=lambda batch: 7 * len(batch[0]))

    again = advise(by_token, batch_sizes=SIZES, known=(16, 0.2))

    torch.testing.assert_close(again.edge.mean, advice.edge.mean)
    torch.testing.assert_close(again.bulk.noise, advice.bulk.noise)
    torch.testing.assert_close(again.bulk.outliers, advice.bulk.outliers)


def test_edges_follow_from_the_prediction(advice):
    best = advice.prediction.best

    torch.testing.assert_close(advice.edge.mean, stable_rate(best.value.mean))
    torch.testing.assert_close(
        advice.rate.mean, stable_rate(best.value.mean + 2 * best.spread.mean.nan_to_num())
    )
    assert bool((advice.rate.mean[:2] < advice.edge.mean[:2]).all())


def test_the_same_seed_gives_the_same_advice(risk, advice):
    again, other = (
        advise(risk, batch_sizes=SIZES, known=(16, 0.2), generator=seeded(seed)) for seed in (0, 8)
    )

    assert str(again) == str(advice)
    assert to_json(again) == to_json(advice)
    assert str(other) != str(advice)


def test_every_figure_has_an_error_or_says_why_not(advice):
    estimates = {entry.name: getattr(advice, entry.name) for entry in fields(advice)}
    estimates = {key: value for key, value in estimates.items() if isinstance(value, Estimate)}

    assert len(estimates) > 8
    for name, estimate in estimates.items():
        known = estimate.mean.isfinite()
        assert bool(estimate.error()[known].isfinite().all()), name
        assert bool(known.all()) or name in ("changes_at", "exponent_multiplicative"), name


def test_advice_is_printed_and_written_as_json(advice):
    text, plain = str(advice), json.loads(to_json(advice))

    assert plain["batch_sizes"] == list(SIZES)
    assert len(plain["sentences"]) == len(SIZES)
    assert "Advice for SGD: hessian of 57 parameters, 96 samples" in text
    assert "Your learning rate of 0.2 is" in text
    assert max(map(len, text.splitlines())) <= 120
    # The table of learning rates and the advice come first.
    first = text.partition("Details")[0]
    assert "trains to" not in first
    assert all(sentence.split(":")[0] in first for sentence in advice.sentences)


def test_momentum_changes_the_edge_by_its_formula(risk, advice):
    for name, factor in (("momentum", 1.9), ("nesterov", 1.9 / 2.8)):
        other = advise(risk, batch_sizes=SIZES, optimizer=name)
        value, full = other.prediction.best.value.mean, other.prediction.lambda_max.mean
        expected = stable_rate(value, optimizer=name, momentum=0.9, full=full)
        torch.testing.assert_close(other.edge.mean, expected)
        # All data have no noise. Smaller batches have, and momentum sums it up.
        assert float(other.edge.mean[-1]) == pytest.approx(factor * float(advice.edge.mean[-1]))
        assert bool((other.edge.mean < 0.9 * factor * advice.edge.mean)[:-1].all())


def test_adam_without_its_divisors_follows_the_square_root_rule(risk):
    advice = advise(risk, batch_sizes=SIZES, optimizer="adam", known=(16, 0.01))

    assert bool(advice.edge.mean.isnan().all())
    assert "pass its optimiser as state=" in advice.edge.status.message
    torch.testing.assert_close(
        advice.rate.mean, 0.01 * torch.tensor([0.5, 1.0, 6**0.5], dtype=torch.float64)
    )
    assert "not known" in str(advice)
    ratio = 1 + float(advice.prediction.lambda_max) / (0.01 * float(advice.damping.mean[0]))
    assert float(advice.ratio.mean[0]) == pytest.approx(ratio)


def test_the_edge_of_adam_is_that_of_the_preconditioned_matrix():
    risk, optimizer = trained(partial(Adam, lr=0.01))
    divisor = divisors(risk, optimizer)
    matrix = curvature_operator(risk, "hessian").dense() / divisor.outer(divisor).sqrt()
    values, vectors = torch.linalg.eigh(matrix)

    top, along = preconditioned_curvature(risk, divisor)
    advice = advise(risk, batch_sizes=SIZES, optimizer="adam", state=optimizer)

    assert float(top) == pytest.approx(float(values[-1]), rel=1e-3)
    # V along the eigenvector, sample by sample; N = 96 samples are groups of one.
    x, y = samples()
    rows = [
        hessian(Risk(risk.model, risk.loss_fn, (x[i : i + 1], y[i : i + 1])), engine="eager")
        for i in range(N)
    ]
    root = divisor.rsqrt()
    products = torch.stack([root * (op @ (root * vectors[:, -1])) for op in rows])
    exact = float((products - products.mean(0)).square().sum(1).mean())
    assert float(along) == pytest.approx(exact, rel=0.05)
    edge = 2 * 1.9 / 0.1 / float(values[-1])
    assert float(advice.edge.mean[-1]) == pytest.approx(edge, rel=1e-3)
    assert bool(advice.edge.mean.diff().ge(0).all())


def test_the_least_damping_of_adam_is_where_it_becomes_unstable_on_a_quadratic(risk):
    advice = advise(risk, batch_sizes=SIZES, optimizer="adam")
    full, beta, rate = float(advice.prediction.lambda_max), 0.9, 0.3

    def growth(curvature, damping):
        """Largest eigenvalue of a step of E w^2, E wm and E m^2 for batches of random curvature."""
        square = full * curvature  # lambda^2 + v, as lambda' = lambda + v / lambda
        mean = torch.tensor([(1 - beta) * full, beta, 0.0])
        own = torch.tensor([(1 - beta) ** 2 * square, 2 * beta * (1 - beta) * full, beta**2])
        s, w, c = rate / damping, torch.tensor([1.0, 0, 0]), mean
        # m' = beta m + (1 - beta) h w and w' = w - (alpha / delta) m'
        step = torch.stack([w - 2 * s * c + s**2 * own, c - s * own, own]).double()
        return float(torch.linalg.eigvals(step).abs().max())

    assert bool((advice.damping.error() > 0)[:2].all())
    for curvature, least in zip(
        advice.prediction.best.value.mean, advice.damping.mean, strict=True
    ):
        assert growth(float(curvature), 1.01 * rate * float(least)) < 1
        assert growth(float(curvature), 0.99 * rate * float(least)) > 1
    assert bool((advice.damping.mean > advice.damping_papers.mean).all())
    # The momentum of K-FAC sums gradients, that of Adam averages them.
    kfac = advise(risk, batch_sizes=SIZES, optimizer="kfac")
    torch.testing.assert_close(kfac.damping.mean, advice.damping.mean / (1 - beta))


def test_divisors_are_those_with_which_adam_steps():
    risk, optimizer = trained(partial(Adam, lr=0.01), steps=3)

    divisor = divisors(risk, optimizer)

    before = torch.cat([p.detach().flatten() for p in risk.model.parameters()])
    for p in risk.model.parameters():
        p.grad = torch.zeros_like(p)
    mean = torch.cat([optimizer.state[p]["exp_avg"].flatten() for p in risk.model.parameters()])
    optimizer.step()
    after = torch.cat([p.detach().flatten() for p in risk.model.parameters()])
    # w - lr m_hat / D, where the step has multiplied m by 0.9 and v by 0.999.
    old = divisor - 1e-8
    fresh = old * (0.999 * (1 - 0.999**3) / (1 - 0.999**4)) ** 0.5 + 1e-8
    expected = -0.01 * 0.9 * mean / (1 - 0.9**4) / fresh
    torch.testing.assert_close(after - before, expected)


def test_divisors_of_amsgrad_are_the_largest_so_far():
    risk, optimizer = trained(partial(Adam, lr=0.01, amsgrad=True), steps=40)
    squares = [optimizer.state[p]["max_exp_avg_sq"].flatten() for p in risk.model.parameters()]

    expected = (torch.cat(squares) / (1 - 0.999**40)).sqrt() + 1e-8

    torch.testing.assert_close(divisors(risk, optimizer), expected)


def test_trials_are_compared_with_the_edge(risk):
    advice = advise(
        risk, batch_sizes=(16,), verify=lambda params, rate: SGD(params, lr=rate), known=(16, 50.0)
    )
    trial = advice.trainable

    assert trial is not None
    assert trial.samples.shape == (5, 1)
    times = float(trial) / float(advice.edge)
    assert f"{times:.2g} times the edge" in advice.sentences[0]
    assert "these weights are not stable" in advice.sentences[0]
    assert ("stable only" in advice.sentences[0]) == (times < 1)
    assert ("further than usual" in advice.sentences[0]) == (times > 5)


def test_trials_overrule_the_prediction(risk):
    def bold(params, rate):
        return SGD(params, lr=20 * rate)

    advice = advise(risk, batch_sizes=(96,), verify=bold)

    limit = float(advice.trainable)
    assert limit < float(advice.rate)
    assert advice.sentences[0].startswith(
        f"Use a learning rate of at most {limit:.2g}, the limit of the trials: "
    )
    assert "The trials were stable only up to" in advice.sentences[0]


def test_no_learning_rate_is_advised_if_all_of_a_trial_failed(risk):
    def explosive(params, rate):
        return SGD(params, lr=1e9)

    advice = advise(risk, batch_sizes=(96,), verify=explosive)

    assert math.isinf(float(advice.trainable.truncation))
    assert advice.sentences[0].startswith(
        f"The edge is {float(advice.edge):.2g}, but no learning rate is advised."
    )
    assert "In at least one trial, all learning rates failed" in advice.sentences[0]


def test_a_warning_asks_for_trials_only_if_there_were_none():
    risk = trained(norm=True)[0]

    without, verified = (
        advise(risk, batch_sizes=(16,), verify=verify)
        for verify in (False, lambda params, rate: SGD(params, lr=rate))
    )

    assert any("Run trials (verify)" in warning for warning in without.warnings)
    assert not any("verify" in warning for warning in verified.warnings)
    assert any("Only the trials include this" in warning for warning in verified.warnings)


def test_sentences_report_a_disagreement_with_trials(risk):
    def frozen(params, rate):
        return SGD(params, lr=1e-9 * rate)

    advice = advise(risk, batch_sizes=(96,), verify=frozen)

    assert "found no limit" in advice.sentences[0]
    assert "the limit of the trials" not in advice.sentences[0]


def test_advice_warns_of_weights_that_are_not_near_a_minimum():
    risk = Risk(network(), functional.cross_entropy, samples())

    advice = advise(risk, batch_sizes=(16,))

    assert any(warning.startswith("not near a minimum") for warning in advice.warnings)


def test_batch_norm_gives_a_warning_and_its_training_mode_is_refused():
    risk = trained(norm=True)[0]

    advice = advise(risk, batch_sizes=(16,))

    assert any(warning.startswith("batch norm") for warning in advice.warnings)
    x, y = samples()
    batches = Risk(risk.model, functional.cross_entropy, (x, y), batch_size=16, batch_norm="train")
    with pytest.raises(
        ValueError, match=r"advise\(\) needs batch_norm='eval' .*got a risk with batch norm"
    ):
        advise(batches, batch_sizes=(16,))


def test_the_cost_is_known_before(risk, advice):
    text = advice_cost(risk)

    promised = int(text.split()[1])
    spent = advice.prediction.cost + advice.noise.num_products
    assert spent <= promised
    assert "57 x 57" in text
    assert advice.cost <= 120
    assert " s: " not in text
    assert " s: " in advice_cost(risk, timed=True)


def test_a_budget_reduces_lanczos_steps_and_a_warning_reports_it(risk, advice):
    found = advise(risk, batch_sizes=SIZES, max_products=55)

    assert 14 + found.prediction.cost + found.noise.num_products <= 55
    assert "55 products" in advice_cost(risk, max_products=55)
    assert found.warnings[-1].startswith("max_products=55 allowed only 14 of 40 Lanczos steps")
    assert not any("max_products" in warning for warning in advice.warnings)
    with pytest.raises(ValueError, match="max_products must be at least 51, got 50"):
        advise(risk, max_products=50)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"batch_sizes": [0]}, "batch_sizes must be between 1 and 96, got 0"),
        ({"batch_sizes": [97]}, "batch_sizes must be between 1 and 96, got 97"),
        ({"batch_sizes": []}, "batch_sizes must not be empty"),
        ({"optimizer": "lion"}, "optimizer must be one of sgd"),
        ({"momentum": 0.9}, "momentum must be 0 for sgd"),
        ({"optimizer": "adam", "momentum": math.nan}, "momentum must be a number that is"),
        ({"matrix": "fisher"}, "matrix must be one of hessian, ggn"),
        ({"known": (0, 0.1)}, r"known\[0\] must be at least 1, got 0"),
        ({"known": (8, 0.1, 3)}, "known must be a pair of a batch size and a learning rate, got"),
        ({"known": 8}, "known must be a pair of a batch size and a learning rate, got 8"),
        ({"optimizer": "adam", "momentum": 1.0}, "momentum must be below 1 for adam, got 1.0"),
        ({"known": (8, math.nan)}, r"known\[1\] must be"),
        ({"known": (8, 0.0)}, r"known\[1\] must be"),
        ({"optimizer": "kfac", "verify": True}, "verify must be False or a function"),
        (
            {"state": SGD([nn.Parameter(torch.ones(1))])},
            "state is only for optimizer='adam', got optimizer='sgd'",
        ),
        (
            {"state": SGD([nn.Parameter(torch.ones(1))]), "optimizer": "adam"},
            "state must be an Adam optimiser that has taken a step with the parameters of the risk",
        ),
    ],
)
def test_wrong_arguments_are_one_clear_line(risk, options, match):
    with pytest.raises(ValueError, match=match) as caught:
        advise(risk, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("verify", "match"),
    [
        ("yes", "verify must be a function of parameters and a learning rate, got 'yes'"),
        (lambda params: SGD(params), r"verify must take two arguments, .* of \(params\)"),
        (lambda params, rate: None, "must return a torch optimiser, got NoneType"),
    ],
)
def test_a_wrong_function_of_trials_is_one_clear_line(risk, verify, match):
    with pytest.raises(TypeError, match=match):
        advise(risk, batch_sizes=(16,), verify=verify)


def test_functions_of_trials_are_checked_before_anything_is_computed(risk, monkeypatch):
    monkeypatch.setattr("ritz.measures._advice.lanczos", None)

    with pytest.raises(ValueError, match="verify must be False or a function"):
        advise(risk, optimizer="kfac", verify=True)


def test_exponents_and_sentences_follow_from_the_edges(advice):
    sizes = torch.tensor(SIZES, dtype=torch.float64)
    slopes = advice.edge.mean.log().diff() / sizes.log().diff()

    torch.testing.assert_close(advice.exponent.mean[:-1], slopes)
    shares = 1 - advice.edge.mean / advice.edge.mean[-1]
    for slope, share, sentence in zip(slopes.tolist(), shares, advice.sentences, strict=False):
        limit = "noise of" if share > 2 / 3 else "curvature sets" if share < 1 / 3 else "together"
        assert limit in sentence
        assert (f"multiplies the edge by {2**slope:.2g}" in sentence) == bool(share > 1 / 3)


def test_advice_reports_a_loss_without_curvature():
    def flat(outputs, target):
        return (outputs - target).mean()

    advice = advise(Risk(nn.Linear(3, 1), flat, (torch.ones(9, 3), torch.zeros(9, 1))))

    assert "no learning rate is unstable" in advice.warnings[0]
    assert "there is no limit" in advice.sentences[0]
    assert not advice.edge.mean.isfinite().any()


def test_weights_with_nan_are_one_clear_line(risk):
    model = network()
    with torch.no_grad():
        model[0].weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"parameter '0.weight' must be finite, got 1 NaN"):
        advise(Risk(model, functional.cross_entropy, samples()))


def test_a_batch_size_of_a_float_is_refused(risk):
    with pytest.raises(TypeError, match=r"batch_sizes must be an integer, got 8\.0"):
        advise(risk, batch_sizes=[8.0])


def test_default_batch_sizes_fit_the_data(risk):
    assert advise(risk).batch_sizes == (8, 32)


def test_no_rate_is_advised_where_negative_curvature_is_large(risk):
    advice = advise(risk, batch_sizes=SIZES)
    top = float(advice.prediction.lambda_max)
    saddle = replace(advice, smallest=Estimate.exact(-0.5 * top, method="test"))

    assert "no learning rate is advised" in advice_sentence(saddle, 0)
    assert "use a learning rate" in advice_sentence(advice, 0).lower()
    assert " rate " not in str(saddle).split("\n\n")[1].splitlines()[0]
    assert " rate " in str(advice).split("\n\n")[1].splitlines()[0]
    # Trials count more than the edge, and without an edge there is nothing to advise against.
    tried = replace(saddle, trainable=advice.rate)
    assert "use a learning rate" in advice_sentence(tried, 0).lower()
    flat = replace(saddle, edge=replace(advice.edge, mean=advice.edge.mean * math.inf))
    assert "advised" not in advice_sentence(flat, 0)
