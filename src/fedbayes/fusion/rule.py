"""``Rule``: what every fusion rule is, and the registry that finds rules by name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from ..errors import ConfigError, PosteriorError, nearest
from ..own import own_name
from ..posterior import Gaussian, Posterior
from .layout import Layout

Statistics = dict[str, Tensor]
"""What a client adds to the total: float64 tensors by name. Totals are statistics too. ``x_low``, where there is one, is the
rounding error of ``x``: the pair stands for their exact sum."""


class WeightSums(NamedTuple):
    """What a conclusion may need to know of the clients' weights, which need not be normalised."""

    total: float
    squares: float
    largest: float
    count: int
    total_low: float = 0.0
    """What rounding took from ``total``."""

    @staticmethod
    def of(weights: Iterable[float]) -> WeightSums:
        """Sum weights exactly rounded, so that their order does not matter."""
        w = list(weights)
        total = math.fsum(w)
        positive = sum(x > 0 for x in w)  # a client of weight 0 is not there
        return WeightSums(total, math.fsum(x * x for x in w), max(w, default=0.0), positive, math.fsum([*w, -total]))


@dataclass(frozen=True)
class Rule:
    """A fusion rule: two formulas, elementwise on tensors of any shape, and a few words about them.

    ``terms`` says what a client adds to the total; ``solve`` makes the fused Gaussian of the total. Everything
    else is common to all rules: addition, points (fused by weighted mean), checks, streaming, saving.
    A rule's options are its dataclass fields; configuration files and the command line set them by name.
    """

    name: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    formula: ClassVar[str] = ""
    papers: ClassVar[str] = ""
    effect: ClassVar[str] = ""
    """What the rule does to the variance."""
    when: ClassVar[str] = ""
    """When to use it."""
    needs_previous: ClassVar[bool] = False
    """Whether it cannot do without the previous global posterior."""
    weighs: ClassVar[bool] = True
    """Whether the clients' weights matter for Gaussians (points are always averaged by weight)."""
    is_sum: ClassVar[bool] = True
    """Whether sums of statistics are all it needs, so that secure aggregation may hide the single client."""
    uses_individuals: ClassVar[bool] = False
    """Whether it must see single posteriors."""
    allows_zero_variance: ClassVar[bool] = False
    """Whether a variance of zero is acceptable in a client's posterior."""

    draws: ClassVar[bool] = False
    """Whether it draws random numbers (addressed by client)."""

    def mass(self, weight: float) -> float:
        """Return the weight the Gaussians of a client count with."""
        return weight

    def terms(self, q: Gaussian, weight: Any, pivot: Gaussian, address: tuple[int | str, ...]) -> Statistics:
        """Return what a client adds to the total.

        ``q`` and ``pivot`` are float64; ``weight`` is a number (or broadcasts against ``q``); ``pivot`` is the previous global
        posterior where there is one, or a posterior agreed on by all parties: a point to take moments about, so
        that nothing cancels; ``address`` names the client for rules that draw.
        """
        raise NotImplementedError

    def terms_near(self, q: Gaussian, weight: Any, pivot: Gaussian) -> Statistics:
        """Return terms that suffice when the pivot is one of the clients, so that moments about it do not cancel."""
        return self.terms(q, weight, pivot, ())

    def checked_terms(self, q: Gaussian, weight: Any, pivot: Gaussian, address: tuple[int | str, ...]) -> Statistics:
        """Return the terms, or say what is wrong with them (a number too few would be added in the wrong place)."""
        terms: Any = self.terms(q, weight, pivot, address)
        if not isinstance(terms, dict):
            raise ConfigError(
                f"the rule '{self.name}': `terms` must return a dict of tensors, not a {type(terms).__name__}."
            )
        for key, term in terms.items():
            if key == "points":
                raise ConfigError(
                    f"the rule '{self.name}': the statistic 'points' is taken by the point tensors; choose another name."
                )
            if not isinstance(term, Tensor) or term.shape != q.mean.shape:
                found = f"shape {tuple(term.shape)}" if isinstance(term, Tensor) else f"type {type(term).__name__}"
                raise ConfigError(
                    f"the rule '{self.name}': the statistic '{key}' must be a tensor of the weights' shape {tuple(q.mean.shape)}; it has {found}."
                )
        return terms

    def solve(self, total: Statistics, weights: WeightSums, pivot: Gaussian) -> Gaussian:
        """Return the fused mean and variance of the total."""
        raise NotImplementedError

    def mend(self, fused: Gaussian, pivot: Gaussian) -> tuple[Gaussian, Tensor | None]:
        """Return the Gaussian to use, and a mask of the weights that had to be repaired (None: none can need it)."""
        return fused, None

    def summarize(
        self,
        posterior: Posterior,
        weight: float,
        pivot: Posterior,
        address: tuple[int | str, ...] = (),
        layout: Layout | None = None,
    ) -> Statistics:
        """Return a client's statistics as flat float64 vectors: the rule's terms, and ``points``; pure, so it may run at the client."""
        layout = layout or Layout.of(pivot)
        terms: Statistics = {}
        if layout.gaussians:
            q, p = layout.flat_gaussian(posterior), layout.flat_gaussian(pivot)
            terms = self.checked_terms(q, self.mass(weight), p, (*address, 0))
        return {**terms, "points": weight * layout.flat_points(posterior)} if layout.points else terms

    @staticmethod
    def add(total: Statistics, more: Statistics) -> Statistics:
        """Return the sum of two statistics (plain float64; ``Accumulator`` adds without regard to order)."""
        return {key: total[key] + more[key] for key in total}

    def conclude(
        self, total: Statistics, weights: Iterable[float], pivot: Posterior, layout: Layout | None = None
    ) -> tuple[Posterior, float]:
        """Return the fused posterior of a total over clients of these weights, and the share of weights repaired."""
        layout, weights = layout or Layout.of(pivot), list(weights)
        fused, repaired = layout.flat_gaussian(pivot), 0.0
        if layout.weights:
            p = fused
            fused, mask = self.mend(Gaussian(*self.solve(total, WeightSums.of(map(self.mass, weights)), p)), p)
            self._refuse_unfit(fused, layout)
            repaired = 0.0 if mask is None else float(mask.double().mean())
        points = total["points"] / WeightSums.of(weights).total if layout.points else torch.zeros(0)
        return layout.build(fused, points), repaired

    def _refuse_unfit(self, fused: Gaussian, layout: Layout) -> None:
        """Raise unless the formulas gave finite means and finite variances that are not negative (0: one too small for a float64)."""
        bounds = torch.stack([*torch.aminmax(fused.mean), *torch.aminmax(fused.variance)])
        if bool(torch.isfinite(bounds).all() & (bounds[2] >= 0)):
            return
        at = 0
        for entry in layout.gaussians:
            piece = slice(at, at := at + entry.shape.numel())
            bad = ~(
                torch.isfinite(fused.mean[piece]) & torch.isfinite(fused.variance[piece]) & (fused.variance[piece] >= 0)
            )
            if bool(bad.any()):
                raise PosteriorError(
                    f"the rule '{self.name}' gave {int(bad.sum())} of {bad.numel()} weights of '{entry.name}' no finite mean or no positive "
                    "variance; a rule whose formula can do so repairs it in `mend`."
                )

    def options(self) -> dict[str, Any]:
        """Return the rule's options as set."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


_RULES: dict[str, type[Rule]] = {}
_NAMES: dict[str, str] = {}
R = TypeVar("R", bound=type[Rule])


def register(rule: R) -> R:
    """Make a rule usable by its name and aliases everywhere, including configuration files. Use as a decorator."""
    if not rule.name:
        raise ConfigError(f'{rule.__name__} has no name; set `name: ClassVar[str] = "..."`.')
    for method in ("terms", "solve"):
        if getattr(rule, method) is getattr(Rule, method):
            raise ConfigError(
                f"the rule '{rule.name}' does not define `{method}`; a rule needs both `terms` and `solve`."
            )
    for name in (rule.name, *rule.aliases):
        owner = _NAMES.get(_key(name))
        if owner is not None and _RULES[owner].__qualname__ != rule.__qualname__:
            raise ConfigError(f"the rule name '{name}' is taken by '{owner}'; choose another.")
    _RULES[rule.name] = rule
    _NAMES.update({_key(name): rule.name for name in (rule.name, *rule.aliases)})
    return rule


def rules() -> tuple[type[Rule], ...]:
    """Return every registered rule, in order of registration: their class attributes are the table of rules."""
    return tuple(_RULES.values())


def get_rule(name: str | Rule | type[Rule], **options: Any) -> Rule:
    """Return the rule of that name or alias (or that rule itself), with options given as values or as text ("population", "1000").

    A name may be ``package.module:rule``: the module is imported first, so that rules of your own work in configuration files.
    """
    if isinstance(name, type) and issubclass(name, Rule):
        return name(**_converted(name, options))
    if not isinstance(name, str | Rule):
        raise ConfigError(f"a fusion rule is named by text; {name!r} is of type {type(name).__name__}.")
    if isinstance(name, str):
        name = own_name(name, "fusion rule")
    if isinstance(name, Rule):
        return dataclasses.replace(name, **_converted(type(name), options)) if options else name
    found = _NAMES.get(_key(name))
    if found is None:
        raise ConfigError(f"there is no fusion rule '{name}'; {nearest(name, _NAMES)}")
    rule = _RULES[found]
    return rule(**_converted(rule, options))


def _key(name: str) -> str:
    return name.strip().lower().replace("_", "-").replace(" ", "-")


def _converted(rule: type[Rule], options: dict[str, Any]) -> dict[str, Any]:
    if not options:
        return {}  # reading type hints takes longer than fusing a small model
    hints = get_type_hints(rule)
    known = {f.name for f in dataclasses.fields(rule)}
    for option in options:
        if option not in known:
            hint = nearest(option, known) if known else "it has none."
            raise ConfigError(f"the rule '{rule.name}' has no option '{option}'; {hint}")
    return {n: _convert(rule, n, v, hints[n]) for n, v in options.items()}


def _convert(rule: type[Rule], option: str, given: Any, kind: Any) -> Any:
    """Return ``given`` as the type of the option's field, or say what would be right."""
    where = f"option '{option}' of the rule '{rule.name}'"
    if get_origin(kind) is Literal:
        if given not in get_args(kind):
            raise ConfigError(f"{where} is {given!r}; {nearest(str(given), map(str, get_args(kind)))}")
        return given
    if kind is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if str(given).lower() not in words:
            raise ConfigError(f"{where} is {given!r}; it must be true or false.")
        return words[str(given).lower()]
    if kind in (int, float):
        try:
            number = float(given)
            return kind(given) if kind is float or isinstance(given, str) else _whole(number)
        except (TypeError, ValueError, OverflowError):
            kinds = {int: "a whole number", float: "a number"}
            raise ConfigError(f"{where} is {given!r}; it must be {kinds[kind]}.") from None
    return given


def _whole(number: float) -> int:
    if number != int(number):
        raise ValueError
    return int(number)
