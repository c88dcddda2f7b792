"""A user's own network made Bayesian: what changes, what does not, and what is reported."""

from __future__ import annotations

import copy
import pickle
import re
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch import nn as tnn
from torch.nn.functional import conv2d as another_name
from torch.nn.utils import prune

from fedbayes import nn
from fedbayes.errors import ConfigError

VARIATIONAL = ["flipout", "local", "sample"]


class Shared(tnn.Module):
    """A residual network that uses one block three times and one linear layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = tnn.Conv2d(3, 8, 3, padding=1)
        self.block = tnn.Sequential(tnn.Conv2d(8, 8, 3, padding=1, bias=False), tnn.BatchNorm2d(8), tnn.ReLU())
        self.again = self.block
        self.gate = tnn.Linear(8, 8)
        self.head = tnn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for block in (self.block, self.again, self.block):
            x = x + block(x)
        x = x.mean((-2, -1))
        return self.head(self.gate(torch.relu(self.gate(x))))


class Unseen(tnn.Module):
    """Uses a parameter in a functional convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = tnn.Parameter(torch.randn(4, 3, 3, 3))
        self.head = tnn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.conv2d(x, self.kernel).mean((-2, -1)))


class Standardised(tnn.Conv2d):
    """A convolution with a forward of its own."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, w, self.bias)


USER_MODELS = {
    "linear": (lambda: tnn.Linear(6, 3), (6,)),
    "mlp": (lambda: tnn.Sequential(tnn.Linear(6, 8), tnn.Tanh(), tnn.LayerNorm(8), tnn.Linear(8, 3)), (6,)),
    "conv1d": (
        lambda: tnn.Sequential(tnn.Conv1d(2, 4, 5, 2), tnn.BatchNorm1d(4), tnn.AdaptiveAvgPool1d(1), tnn.Flatten(), tnn.Linear(4, 3)),
        (2, 20),
    ),
    "conv2d": (
        lambda: tnn.Sequential(tnn.Conv2d(3, 4, 3, groups=1), tnn.GroupNorm(2, 4), tnn.ReLU(), tnn.MaxPool2d(2), tnn.Flatten(), tnn.LazyLinear(3)),
        (3, 8, 8),
    ),
    "shared": (Shared, (3, 8, 8)),
}  # fmt: skip


def made(name: str) -> tuple[tnn.Module, Tensor]:
    torch.manual_seed(0)
    make, shape = USER_MODELS[name]
    model = make().eval()
    x = torch.randn(3, *shape)
    model(x)  # materialises lazy layers
    return model, x


@pytest.mark.parametrize("name", USER_MODELS)
@pytest.mark.parametrize("kind", VARIATIONAL)
def test_a_users_model_keeps_means_and_everything_else(name: str, kind: str) -> None:
    model, x = made(name)
    before = copy.deepcopy(model.state_dict())
    bayesian = nn.bayesianize(model, kind, sigma=0.1)
    assert not any(n.endswith("_rho") for n in model.state_dict())  # the original is untouched
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    for n, t in before.items():
        assert torch.equal(bayesian.state_dict()[n], t)
    assert not torch.allclose(bayesian(x), bayesian(x))
    assert not torch.allclose(bayesian(x), model(x), atol=1e-4)
    quiet = {n: torch.full_like(t, -torch.inf) if n.endswith("_rho") else t for n, t in nn.state_of(bayesian).items()}
    assert torch.allclose(nn.caller(bayesian)(quiet, x), model(x), atol=1e-6)
    for n, p in bayesian.named_parameters():
        if n.endswith("_rho"):
            assert torch.allclose(F.softplus(p), torch.tensor(0.1))


@pytest.mark.parametrize("name", USER_MODELS)
def test_dropout_keeps_every_name_and_drops(name: str) -> None:
    model, x = made(name)
    thinned = nn.bayesianize(model, "dropout", dropout=0.5)
    assert [n for n, _ in thinned.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert not torch.allclose(thinned(x), thinned(x))
    assert torch.allclose(nn.bayesianize(model, "dropout", dropout=0.0)(x), model(x))


def test_shared_layers_stay_shared() -> None:
    model, _ = made("shared")
    bayesian = nn.bayesianize(model, "flipout")
    assert bayesian.block is bayesian.again
    names = nn.gaussian_names(dict(bayesian.named_parameters()))
    assert names == ["stem.weight", "block.0.weight", "gate.weight", "head.weight"]
    posterior = nn.posterior_of(bayesian)
    state = nn.from_posterior(posterior)
    zero = {n: torch.full_like(t, -torch.inf if n.endswith("_rho") else 0) for n, t in state.items()}
    before = {n: t.clone() for n, t in nn.state_of(bayesian).items()}
    assert not nn.caller(bayesian.eval())(zero, torch.randn(2, 3, 8, 8)).any()  # every use of every layer
    after = nn.state_of(bayesian)
    assert all(torch.equal(after[n], t) and after[n].data_ptr() != state[n].data_ptr() for n, t in before.items())


def test_lanes_of_a_network_with_shared_layers() -> None:
    torch.manual_seed(0)
    models = [Shared().train() for _ in range(3)]
    states = [{n: t.detach().clone() for n, t in nn.state_of(m).items()} for m in models]
    lanes = {n: torch.stack([s[n] for s in states]) for n in states[0]}
    x = torch.randn(3, 4, 3, 8, 8)
    call = nn.caller(models[0])
    out = torch.vmap(lambda s, x: call(s, x), randomness="different")(lanes, x)
    for lane, model in enumerate(models):
        assert torch.allclose(out[lane], model(x[lane]), atol=1e-5)
        assert torch.allclose(lanes["block.1.running_mean"][lane], model.block[1].running_mean, atol=1e-6)
    assert lanes["block.1.num_batches_tracked"].tolist() == [3, 3, 3]


def test_tied_weights_share_mean_and_scale() -> None:
    model = tnn.Sequential(tnn.Linear(4, 4), tnn.ReLU(), tnn.Linear(4, 4))
    model[2].weight = model[0].weight
    bayesian = nn.bayesianize(model, "flipout")
    assert bayesian[0].weight is bayesian[2].weight
    assert bayesian[0].weight_rho is bayesian[2].weight_rho
    assert len(nn.posterior_of(bayesian).gaussians) == 1
    state = {n: torch.full_like(t, -torch.inf if n.endswith("rho") else 0.5) for n, t in nn.state_of(bayesian).items()}
    assert nn.caller(bayesian)(state, torch.ones(1, 4)).tolist() == [[5.5] * 4]  # relu(4·½ + ½)·½·4 + ½


def test_a_mean_tied_to_a_point_is_refused() -> None:
    model = tnn.Sequential(tnn.Embedding(4, 3), tnn.Linear(3, 4, bias=False))
    model[1].weight = model[0].weight
    with pytest.raises(ConfigError, match=r"'1.weight' is tied"):
        nn.bayesianize(model, "flipout", warn=False)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("fc*", {"fc1", "fc2", "fc3"}),
        ("conv*, fc3", {"conv1", "conv2", "fc3"}),
        (["fc1"], {"fc1"}),
        (tnn.Linear, {"fc1", "fc2", "fc3"}),
        (lambda name, layer: isinstance(layer, tnn.Conv2d), {"conv1", "conv2"}),
    ],
)
def test_where_chooses_layers(where, expected: set[str]) -> None:
    model = nn.build("lenet", "deterministic")
    bayesian = nn.bayesianize(model, "flipout", where=where)
    gaussian = {n.rpartition(".")[0] for n in nn.gaussian_names(dict(bayesian.named_parameters()))}
    assert gaussian == expected
    assert set(nn.survey(model, where).converted) == expected


def test_biases_become_gaussian_only_when_asked() -> None:
    model, _ = made("mlp")
    assert nn.gaussian_names(dict(nn.bayesianize(model).named_parameters())) == ["0.weight", "3.weight"]
    both = nn.gaussian_names(dict(nn.bayesianize(model, bayesian_bias=True).named_parameters()))
    assert both == ["0.weight", "0.bias", "3.weight", "3.bias"]


def test_what_it_cannot_see_is_reported_by_name() -> None:
    with pytest.warns(nn.NotConverted, match=r"Unseen.*conv2d.*kernel") as record:
        bayesian = nn.bayesianize(Unseen(), "flipout")
    assert len(record) == 1
    assert nn.gaussian_names(dict(bayesian.named_parameters())) == ["head.weight"]
    sequence = tnn.Sequential(Standardised(3, 4, 3), tnn.Flatten(), tnn.Linear(4, 2))
    with pytest.warns(nn.NotConverted, match=r"'0' \(Standardised\)"):
        bayesian = nn.bayesianize(sequence, "flipout")
    assert type(bayesian[0]) is Standardised
    with pytest.warns(nn.NotConverted, match=r"'1' \(MultiheadAttention\) uses its weights directly") as record:
        nn.bayesianize(tnn.Sequential(tnn.Linear(4, 4), tnn.MultiheadAttention(4, 2)), "flipout")
    assert len(record) == 1
    with pytest.warns(nn.NotConverted, match="ConvTranspose2d"):
        nn.bayesianize(tnn.Sequential(tnn.Conv2d(1, 2, 3), tnn.ConvTranspose2d(2, 1, 3)), "flipout")


def through_a_helper(x: Tensor, weight: Tensor) -> Tensor:
    return another_name(x, weight)


class OwnConvolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        return torch.ops.aten.convolution.default(x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


class Reads(tnn.Module):
    """Holds a convolution and uses its weight, not the layer; the subclasses do so in less and less visible ways."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = tnn.Conv2d(3, 4, 3)
        self.linear = tnn.Linear(4, 2)
        self.lambda_ = lambda x: F.conv2d(x, self.conv.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.features(x.to(self.linear.weight.dtype)).mean((-2, -1)))

    def features(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.conv.weight)


class ReadsInHelper(Reads):
    def features(self, x: Tensor) -> Tensor:
        conv = self.conv
        return through_a_helper(x, conv.weight)


class ReadsInSuper(Reads):
    def features(self, x: Tensor) -> Tensor:
        return super().features(x)


class ReadsInLambda(Reads):
    def features(self, x: Tensor) -> Tensor:
        return self.lambda_(x)


class ReadsInFunction(Reads):
    def features(self, x: Tensor) -> Tensor:
        return OwnConvolution.apply(x, self.conv.weight)


class ReadsAfterImport(Reads):
    def features(self, x: Tensor) -> Tensor:
        import torch.nn.functional as functional

        return functional.conv2d(x, self.conv.weight)


class ReadsInProduct(Reads):
    def features(self, x: Tensor) -> Tensor:
        return x[..., :2, :2] @ self.conv.weight[:, 0, :2, :2].sum(0)


class ReadsAllOfIt(Reads):
    def features(self, x: Tensor) -> Tensor:
        for kernel in self.conv.parameters():
            return x[..., :2, :2] @ kernel[:, 0, :2, :2].sum(0)
        return x


class ReadsByBoundForward(Reads):
    def __init__(self) -> None:
        super().__init__()
        self.go = self.conv.forward  # bound to torch's, before the layer is another

    def features(self, x: Tensor) -> Tensor:
        return self.go(x)


@pytest.mark.parametrize("cls", [Reads, *Reads.__subclasses__()])
def test_a_weight_read_behind_its_layers_back_is_reported(cls: type[Reads]) -> None:
    (sentence,) = nn.survey(cls()).unseen
    assert sentence.startswith(f"the network ({cls.__name__}) reads 'conv.weight' itself in its forward")
    functional = cls not in (ReadsInProduct, ReadsAllOfIt, ReadsByBoundForward)
    assert ("conv" in sentence.partition("(through ")[2]) == functional
    with pytest.warns(nn.NotConverted, match=r"reads 'conv\.weight'"):
        bayesian = nn.bayesianize(cls())
    assert nn.gaussian_names(dict(bayesian.named_parameters())) == ["conv.weight", "linear.weight"]
    assert not any("reads" in s for s in nn.survey(cls(), where="linear").unseen)  # then it is a point anyway


class ReadsMany(tnn.Module):
    """Reads weights of layers that only running the code would name."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tnn.ModuleList([tnn.Linear(4, 4), tnn.Linear(4, 4)])
        self.one, self.other = tnn.Linear(4, 4), tnn.Linear(4, 4)


class ReadsByIndex(ReadsMany):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.layers[0].weight


class ReadsInLoop(ReadsMany):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x @ layer.weight
        return x


class ReadsByText(ReadsMany):
    def forward(self, x: Tensor) -> Tensor:
        return x @ getattr(self.one, "weight")  # noqa: B009


class ReadsOneOfTwo(ReadsMany):
    def forward(self, x: Tensor) -> Tensor:
        one, other = self.one, self.other
        return other(x @ one.weight)


class ReadsTwiceNamed(ReadsMany):
    def forward(self, x: Tensor) -> Tensor:
        first = second = self.one  # noqa: F841
        return self.other(x @ first.weight)


class ReadsByTorchsForward(ReadsMany):
    def forward(self, x: Tensor) -> Tensor:
        return tnn.Linear.forward(self.one, x)


class ReadsAllInLoop(ReadsMany):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x @ next(layer.parameters())
        return x


@pytest.mark.parametrize("cls", ReadsMany.__subclasses__())
def test_a_weight_read_from_a_layer_that_has_no_plain_name_is_reported(cls: type[ReadsMany]) -> None:
    (sentence,) = nn.survey(cls()).unseen
    name = "one.weight" if cls in (ReadsOneOfTwo, ReadsTwiceNamed) else "*.weight"
    assert sentence.startswith(f"the network ({cls.__name__}) reads '{name}' itself in its forward")


def test_functional_layers_are_found_without_source_and_in_hooks_and_lambdas() -> None:
    names = {"tnn": tnn, "F": F}
    code = "class Typed(tnn.Module):\n  def forward(self, x): return F.conv1d(x, x)"
    exec(code, names)
    kernel = torch.ones(1, 1, 3, 3)
    hooked = tnn.Identity()
    hooked.register_forward_hook(lambda module, inputs, output: F.conv2d(output, kernel))
    replaced = tnn.Linear(4, 4)
    replaced.forward = lambda x: F.linear(x, replaced.weight) * 3  # type: ignore[method-assign]
    network = tnn.ModuleList([names["Typed"](), hooked, replaced, tnn.Linear(2, 2)])
    survey = nn.survey(network)
    assert survey.converted == ("3",)
    assert [s.partition(";")[0] for s in survey.unseen] == [
        "'0' (Typed) calls conv1d in its forward",
        "'1' (Identity) calls conv2d in its forward",
        "'2' (Linear) calls linear in its forward",
    ]


def test_a_point_tied_to_a_converted_weight_is_said_to_see_its_mean() -> None:
    model = tnn.Sequential(tnn.Linear(8, 10, bias=False), tnn.Embedding(10, 8))
    model[0].weight = model[1].weight
    (sentence,) = nn.survey(model).unseen
    assert sentence.startswith("'1' (Embedding) reads '0.weight' itself")
    assert "points" not in sentence


class NotInForward(tnn.Module):
    """Mentions functional layers and weights where they do no harm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = tnn.Linear(4, 4)
        self.conv2d = tnn.Conv2d(1, 1, 1)
        self.norm = None

    def forward(self, x: Tensor) -> Tensor:
        if self.norm is not None:
            return self.norm(x)
        x = x.to(self.linear.weight.device, self.linear.weight.dtype)
        x = x.to(next(self.linear.parameters()).device)
        x = torch.func.functional_call(self.linear, dict(self.linear.named_parameters()), x)
        q = self.linear.forward(self.conv2d(x[None])[0])
        return F.scaled_dot_product_attention(q, q, q)

    def complexity(self) -> Tensor:
        return F.linear(self.linear.weight, self.linear.weight).sum()


class Named(tnn.Linear):
    """A subclass that leaves its forward to torch and adds a method the network relies on."""

    def doubled(self, x: Tensor) -> Tensor:
        return 2 * self(x)


class UsesNamed(tnn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Named(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer.doubled(x)


@pytest.mark.parametrize("kind", [*VARIATIONAL, "dropout"])
def test_subclasses_keep_their_methods_copy_and_pickle(kind: str) -> None:
    model = UsesNamed()
    bayesian = nn.bayesianize(model, kind, sigma=0.5, dropout=0.5)
    assert isinstance(bayesian.layer, Named)
    assert isinstance(bayesian.layer, nn.LAYERS[kind][tnn.Linear])
    x = torch.ones(8, 4)
    for network in (bayesian, copy.deepcopy(bayesian), pickle.loads(pickle.dumps(bayesian))):
        assert type(network.layer) is type(bayesian.layer)
        assert not torch.allclose(network(x), network(x))
        assert all(torch.equal(t, bayesian.state_dict()[n]) for n, t in network.state_dict().items())
    assert type(model.layer) is Named


def test_reparametrised_layers_are_reported_and_left() -> None:
    for wrap in (tnn.utils.parametrizations.weight_norm, tnn.utils.spectral_norm):
        model = tnn.Sequential(wrap(tnn.Linear(4, 4)), tnn.Linear(4, 2))
        with pytest.warns(nn.NotConverted, match="'0"):
            bayesian = nn.bayesianize(model, "flipout")
        assert nn.gaussian_names(dict(bayesian.named_parameters())) == ["1.weight"]
        assert bayesian(torch.ones(1, 4)).shape == (1, 2)


@pytest.mark.filterwarnings("error")
def test_nothing_is_reported_where_all_is_seen() -> None:
    for name in ("mlp", "conv1d", "conv2d", "shared"):
        nn.bayesianize(made(name)[0], "flipout")
        assert nn.survey(made(name)[0]).unseen == ()
    nn.bayesianize(NotInForward(), "flipout")
    nn.bayesianize(UsesNamed(), "flipout")


def test_own_dropout_layers_stay_on_for_mc_dropout() -> None:
    model = tnn.Sequential(tnn.Linear(4, 50), tnn.Dropout(0.5), tnn.Linear(50, 2)).eval()
    x = torch.randn(3, 4)
    thinned = nn.bayesianize(model, "dropout").eval()
    assert not torch.allclose(thinned(x), thinned(x))
    assert sum(isinstance(m, nn.Dropout) for m in thinned.modules()) == 1
    channels = nn.bayesianize(tnn.Sequential(tnn.Conv2d(1, 40, 3), tnn.Dropout2d(0.5)), "dropout").eval()
    y = channels(torch.ones(1, 1, 5, 5))[0].flatten(1)
    assert 5 < (y == 0).all(1).sum() < 35


class FunctionalDropout(tnn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = tnn.LSTM(4, 8, 2, dropout=0.3)
        self.alpha = tnn.AlphaDropout(0.5)
        self.head = tnn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.dropout(self.alpha(self.lstm(x)[0][-1]), 0.5, self.training))


def test_dropout_that_no_layer_holds_is_reported() -> None:
    with pytest.warns(nn.NotConverted) as record:
        nn.bayesianize(FunctionalDropout(), "dropout")
    told = [str(w.message) for w in record]
    assert told[0].startswith(
        "the network (FunctionalDropout) calls dropout in its forward, as a rule off in evaluation"
    )
    assert told[1].startswith("'lstm' (LSTM) has dropout that is off in evaluation")
    assert told[2].startswith("'alpha' (AlphaDropout) has dropout that is off in evaluation")
    assert told[3].startswith("'lstm' (LSTM) has weights that are in no replaceable layer")
    assert len(nn.survey(FunctionalDropout()).unseen) == 1  # of no matter to the other kinds


def test_transformers_drop_in_evaluation_without_gradients_too() -> None:
    """Where torch would take a fast path that knows no dropout."""
    plain = tnn.TransformerEncoder(tnn.TransformerEncoderLayer(8, 2, 16, dropout=0.4, batch_first=True), 2).eval()
    thinned = nn.bayesianize(plain, "dropout", warn=False)
    x, padding = torch.randn(2, 5, 8), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        for options in ({}, {"src_key_padding_mask": padding}):
            assert not torch.allclose(thinned(x, **options), thinned(x, **options))
        for layer in thinned.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
        assert torch.allclose(thinned(x), plain(x), atol=1e-5)


def test_dropout_layers_that_drop_nothing_do_not_count() -> None:
    x = torch.ones(8, 4)
    thinned = nn.bayesianize(tnn.Sequential(tnn.Linear(4, 9), tnn.Dropout(0.0), tnn.Linear(9, 2)), "dropout")
    assert not torch.allclose(thinned(x), thinned(x))


def test_complex_layers_stay_points() -> None:
    model = tnn.Sequential(tnn.Linear(4, 4, dtype=torch.complex64), tnn.Linear(4, 2))
    with pytest.warns(nn.NotConverted, match="'0'"):
        assert nn.gaussian_names(nn.state_of(nn.bayesianize(model))) == ["1.weight"]


def test_impossible_requests_say_what_would_be_right() -> None:
    model, _ = made("mlp")
    with pytest.raises(ConfigError, match="did you mean 'flipout'"):
        nn.bayesianize(model, "flipuot")
    with pytest.raises(ConfigError, match="'None' is no kind of network; valid are: "):
        nn.bayesianize(model, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="`where` picks no layer; the network's layers are: 0, 3"):
        nn.bayesianize(model, "flipout", where=tnn.Conv2d)
    with pytest.raises(ConfigError, match=r"no layer matches 'conv\*'; the network's layers are: 0, 3"):
        nn.bayesianize(model, "flipout", where="conv*")
    with pytest.raises(ConfigError, match=r"no layer matches 'fc\*'"):  # though the other pattern does
        nn.bayesianize(model, "flipout", where="0, fc*")
    with pytest.raises(ConfigError, match="`where` picks no layer; the network's layers are: 0, 3"):
        nn.bayesianize(model, "flipout", where=lambda name, layer: False)
    with pytest.raises(ConfigError, match="the one layer, without a name: leave `where` empty"):
        nn.bayesianize(tnn.Linear(2, 2), "flipout", where="fc*")
    with pytest.raises(ConfigError, match="no linear or convolutional layer"):
        nn.bayesianize(tnn.BatchNorm1d(3), "flipout")
    with pytest.raises(ConfigError, match=r"no linear or convolutional layer.*MultiheadAttention\) uses its weights"):
        nn.bayesianize(tnn.MultiheadAttention(4, 2), "flipout")
    with pytest.raises(ConfigError, match="Bayesian already"):
        nn.bayesianize(nn.bayesianize(model), "local")
    with pytest.raises(ConfigError, match=r"'0' \(LazyLinear\) has no weight yet; pass one batch"):
        nn.bayesianize(tnn.Sequential(tnn.LazyLinear(3)), "flipout")
    with pytest.raises(ConfigError, match=r"cannot be copied.*remove_weight_norm"):
        nn.bayesianize(tnn.Sequential(prune.l1_unstructured(tnn.Linear(4, 4), "weight", 0.5)), "flipout")
    for odd in (threading.Lock(), (x for x in "")):
        holder = tnn.Linear(4, 4)
        holder.odd = odd  # type: ignore[assignment]
        with pytest.raises(ConfigError, match=r"cannot be copied \(cannot pickle '(_thread.lock|generator)' object\)"):
            nn.bayesianize(holder)
    for wrong in ({"where": 3}, {"where": [3]}, {"sigma": "a"}, {"dropout": "a"}):
        ((name, value),) = wrong.items()
        with pytest.raises(ConfigError, match=rf"^{name} is {re.escape(repr(value))}; it must be a "):
            nn.bayesianize(model, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"sigma is 100000, more than weights of type torch.float16 hold"):
        nn.bayesianize(tnn.Linear(8, 4).half(), sigma=1e5)
    with pytest.raises(ConfigError, match="not str"):
        nn.bayesianize("resnet20", "flipout")  # type: ignore[arg-type]
    model.register_parameter("odd_rho", tnn.Parameter(torch.zeros(1)))
    with pytest.raises(ConfigError, match="'odd_rho'; names that end in '_rho' belong to scales"):
        nn.bayesianize(model, "flipout")


class Signed(tnn.Linear):
    _signs = 3


class Mapped(tnn.Linear):
    def apply_map(self) -> None: ...


class Masked(tnn.Linear):
    def __init__(self, *sides: int) -> None:
        super().__init__(*sides)
        self.mask = 3


@pytest.mark.parametrize(
    ("cls", "buffer", "kind", "name"),
    [
        (tnn.Linear, "mask", "dropout", "mask"),
        (Masked, "", "dropout", "mask"),
        (tnn.Linear, "weight_rho", "flipout", "weight_rho"),
        (Signed, "", "flipout", "_signs"),
        (Mapped, "", "local", "apply_map"),
    ],
)
def test_a_layer_that_has_a_name_of_the_bayesian_one_is_refused(cls, buffer: str, kind: str, name: str) -> None:
    model = tnn.Sequential(cls(4, 4), tnn.Linear(4, 2))
    if buffer:
        model[0].register_buffer(buffer, torch.ones(4))
    with pytest.raises(ConfigError, match=rf"'0' \({cls.__name__}\) has a '{name}' of its own.* {kind} layers"):
        nn.bayesianize(model, kind)
    nn.bayesianize(model, kind, where="1")
    nn.bayesianize(model, "sample" if kind == "dropout" else "dropout")  # which do not need it


class Listed(tnn.Module):
    """Runs its layers from an ordinary list beside the registered names."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = tnn.Linear(4, 4), tnn.Linear(4, 2)
        self.order = [self.first, self.second]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = layer(x)
        return x


@pytest.mark.parametrize("kind", [*VARIATIONAL, "dropout"])
def test_layers_kept_in_a_list_are_converted_too(kind: str) -> None:
    model = Listed()
    bayesian = nn.bayesianize(model, kind, sigma=0.5)
    assert bayesian.order[0] is bayesian.first
    assert type(model.first) is tnn.Linear
    x = torch.ones(8, 4)
    assert not torch.allclose(bayesian(x), bayesian(x))


def test_frozen_layers_stay_frozen() -> None:
    model, _ = made("mlp")
    model[0].weight.requires_grad_(False)
    bayesian = nn.bayesianize(model, "flipout")
    assert not bayesian[0].weight_rho.requires_grad
    assert bayesian[3].weight_rho.requires_grad
