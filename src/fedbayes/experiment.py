"""The configuration of an experiment: frozen dataclasses, read from TOML, written to TOML, overridden by ``key=value``.

One section, one dataclass. Every field has a docstring: it is what ``fedbayes run --help`` prints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Data:
    """What is learned from."""

    name: str = "digits"
    """Data set: digits, heart, mnist, fashion-mnist, cifar10, cifar100, svhn, sonar-synthetic, sonar-rocks, deepship, watkins, the path of an .npz file or a folder of recordings, or your own as package.module:name."""
    validation: float = 0.1
    """Share of the training examples the server keeps for validation (choosing the best round)."""
    limit: int = 0
    """Use at most this many training examples, a class-balanced draw by seed (0: all)."""
    test_limit: int = 0
    """Use at most this many test examples, likewise (0: all)."""
    scale: Literal["unit", "standard", "none"] = "unit"
    """Scaling of inputs: unit (images / 255), standard (per channel or column: zero mean, unit deviation), none."""
    mean: Literal["none", "global", "client"] = "global"
    """Mean subtracted from inputs: none, global (of all training data), client (each client its own, the server the test set's: Loomis)."""
    augment: str = "none"
    """Augmentation while training: none; crop (zero-pad by 4, random crop); crop-flip (and horizontal flip); sonar (time shift, gain, band noise, masks); or your own as package.module:name."""
    ood: str = ""
    """A data set whose test inputs serve as out-of-distribution examples in the evaluation (empty: none)."""
    exclude_classes: tuple[int, ...] = ()
    """Classes removed from training and test and used as out-of-distribution examples."""


@dataclass(frozen=True)
class Partition:
    """Who gets what."""

    scheme: str = "dirichlet"
    """iid; shards (k classes each, Fischer); dirichlet (equal sizes: Fischer, Loomis); dirichlet-unequal (NIID-Bench, FedBE); step (FedBE); quantity (sizes skewed, classes alike); column (natural clients); odd-one (one small client unlike the rest: Reyes); or your own as package.module:name."""
    clients: int = 10
    """Number of clients (column: 0 takes as many as the column has values)."""
    alpha: float = 0.5
    """Concentration of the Dirichlet schemes and of quantity skew: small is unequal."""
    classes_per_client: int = 2
    """shards: classes (shards) per client; step: major classes of each; odd-one: classes of the odd client."""
    minimum: int = 10
    """dirichlet-unequal, quantity: least examples per client."""
    minor_examples: int = 10
    """step: examples of every class that every client holds beside its major classes; odd-one: of each class of the odd client."""
    duplicates: bool = False
    """step: deal the minor examples a second time within the major shards, as FedBE's released code does."""
    column: str = ""
    """column: name of the data set's column that names the owner (heart: hospital; sonar: site or recording)."""


@dataclass(frozen=True)
class Model:
    """The network."""

    name: str = "mlp"
    """mlp, cnn, lenet, resnet20 ... resnet56, reyes-mnist, reyes-cifar, fedbe-convnet, spectrogram-cnn, waveform-cnn, or package.module:function for your own."""
    kind: Literal["deterministic", "dropout", "flipout", "local", "sample"] = "flipout"
    """How it is Bayesian: not at all, MC-dropout, Flipout, local reparameterisation, direct weight sampling."""
    init: Literal["he", "xavier", "tfp", "bflp", "torch", "keep"] = "he"
    """Initial means and sigmas: he (He means, constant sigma), xavier (Glorot-uniform means, constant sigma), tfp (mu~N(0,.1), rho~N(-3,.1)), bflp, torch (means drawn as torch.nn does, constant sigma), keep (the means your own network comes with, constant sigma)."""
    sigma: float = 0.02
    """Initial sigma of every Gaussian weight (he, xavier, torch, keep)."""
    dropout: float = 0.2
    """MC-dropout probability."""
    bayesian_bias: bool = False
    """Whether biases of variational layers have a distribution too."""
    where: str = ""
    """Glob pattern of the layers made Bayesian (empty: the network's own choice, usually all)."""
    width: int = 0
    """Width of mlp, cnn, spectrogram-cnn and waveform-cnn (0: the network's own)."""
    shortcut: Literal["A", "B"] = "A"
    """ResNet: parameter-free shortcuts (A) or 1x1 projections with biases as in the Keras example (B)."""


@dataclass(frozen=True)
class Objective:
    """What a client minimises: the negative ELBO per example, and penalties."""

    kl_scale: Literal["client", "federation", "shared"] = "federation"
    """KL divided by the client's examples (Loomis: counts the prior once per client), by the federation's examples (right for averaging rules), or shared (client examples with the prior to the power 1/K: right for product rules)."""
    kl_weight: float = 1.0
    """Multiplies the KL (1: the evidence lower bound; below: a cold posterior)."""
    kl_anneal: int = 0
    """Rounds over which the KL weight rises linearly from 0 (0: at once)."""
    prior_std: float = 1.0
    """Standard deviation s of the prior N(0, s^2)."""
    prior_layers: tuple[str, ...] = ()
    """Other standard deviations by layer, as pattern=s, e.g. fc*=10 (the first pattern that matches counts)."""
    prior: Literal["fixed", "previous"] = "fixed"
    """Prior of every round: fixed N(0, s^2), or the previous global posterior (Fischer: prior update; DWC)."""
    samples: int = 1
    """Weight samples per training step."""
    l2: float = 0.0
    """L2 penalty on deterministic weights (1e-4: Loomis)."""
    proximal: float = 0.0
    """FedProx: mu/2 * |w - w_global|^2 for points, mu * KL(q || q_global) / examples for Gaussians."""


@dataclass(frozen=True)
class Local:
    """How a client trains."""

    epochs: int = 1
    """Local epochs per round."""
    epochs_max: int = 0
    """When positive, each client and round draws its epochs uniformly from 1..epochs_max (FedBE's systems heterogeneity)."""
    steps: int = 0
    """When positive, optimiser steps per round instead of epochs."""
    batch_size: int = 32
    """Examples per step; a short last batch is completed with examples that weigh nothing in the loss."""
    optimizer: Literal["adam", "sgd"] = "adam"
    """adam or sgd."""
    learning_rate: float = 1e-3
    """Learning rate before any schedule."""
    momentum: float = 0.9
    """SGD: momentum (0: none)."""
    nesterov: bool = False
    """SGD: Nesterov's form."""
    weight_decay: float = 0.0
    """Weight decay of the optimiser, on every parameter (BFL-P: 1e-5)."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Adam: decay rates of the moments."""
    eps: float = 1e-8
    """Adam: added to the denominator."""
    clip_norm: float = 0.0
    """Largest norm of a client's gradient (0: no clipping)."""
    keep_state: bool = False
    """Whether a client keeps its optimiser's state from round to round (False: fresh each round, as with Flower)."""
    sigma_learning_rate: float = 0.0
    """Learning rate of the (untransformed) sigmas (0: the same as the means')."""


@dataclass(frozen=True)
class Schedule:
    """Learning rate from round to round."""

    name: Literal["constant", "exponential", "step"] = "constant"
    """constant; exponential after a silent period (Fischer); step: multiplied at given shares of the rounds (FedBE)."""
    silent: int = 50
    """exponential: rounds before the decay begins."""
    decay: float = 0.04
    """exponential: the decay number of the reading below."""
    reading: Literal["exp", "keep", "literal"] = "exp"
    """exponential: the lr is multiplied every round by exp(-decay) (exp), 1 - decay (keep), or decay itself (literal: cannot train)."""
    milestones: tuple[float, ...] = (0.3, 0.6)
    """step: shares of the rounds after which the lr is multiplied."""
    factor: float = 0.1
    """step: multiplier at each milestone."""
    factors: tuple[float, ...] = ()
    """step: in place of factor, what the rate is multiplied by from the start and from each milestone on (FedBE's released code)."""


@dataclass(frozen=True)
class Participation:
    """Which clients train in a round."""

    fraction: float = 1.0
    """Share of the clients drawn each round (at least one)."""
    quorum: float = 1.0
    """Share of the drawn clients whose answers suffice to end the round (over Flower, where clients may fail)."""
    deadline: float = 0.0
    """Seconds after which a round ends with what has arrived, if the quorum is met (0: none)."""


@dataclass(frozen=True)
class Pretrain:
    """Training on the server before the first round (Fischer, Table 4)."""

    fraction: float = 0.0
    """Share of the training data held by the server for it (0: none)."""
    epochs: int = 100
    """At most this many epochs."""
    patience: int = 10
    """Epochs without a better validation accuracy before it stops."""


@dataclass(frozen=True)
class Fusion:
    """How the server makes one posterior of many."""

    rule: str = "nwa"
    """fedavg, nwa, ws, lp, ppa, aalv, conflation, wc, llp, wasserstein, dwc, precision, or an alias (`fedbayes rules` lists them)."""
    weighting: str = "size"
    """Weights of the clients: equal, size, max-discrepancy, max-discrepancy-nearest, distance."""
    options: tuple[str, ...] = ()
    """Options of the rule as name=value, e.g. population=1000 (ppa), sign=fisher (precision), repair=previous (dwc)."""
    on_bad_client: Literal["refuse", "stop"] = "refuse"
    """A client with a non-finite or misshapen posterior: fuse the others without it, or stop the run."""
    server_momentum: float = 0.0
    """FedAvgM: momentum of the server's step on the means (0: none)."""
    server_learning_rate: float = 1.0
    """FedAvgM: length of the server's step."""
    private: bool = False
    """Mask the statistics so that only totals are revealed to the server (over Flower)."""
    max_update: float = 0.0
    """Refuse a client whose mean moved farther than this many times the median client's move (0: no check)."""


@dataclass(frozen=True)
class Distill:
    """FedBE: distil an ensemble drawn from a distribution over models into the global one."""

    enabled: bool = False
    """Whether the server distils after fusing."""
    distribution: Literal["gaussian", "dirichlet", "clients", "posterior", "gaussian-released"] = "gaussian"
    """Models drawn from: a diagonal Gaussian over the clients' models, Dirichlet mixtures of them, none beside the clients (v-distillation), the fused posterior of variational clients, or the released code's Gaussian."""
    samples: int = 10
    """Models drawn (beside the average and the clients)."""
    dirichlet_alpha: float = 1.0
    """Concentration of the Dirichlet over clients' weights."""
    data: str = ""
    """The server's unlabelled inputs: empty for a held-out part of the training set, or a data set's name or .npz file."""
    fraction: float = 0.2
    """Share of the training set held by the server when `data` is empty."""
    sharpen: float = 1.0
    """Temperature of the pseudo-labels (released code: 0.5; 1: none)."""
    epochs: int = 20
    """Passes over the server's inputs."""
    batch_size: int = 128
    """Examples per distillation step."""
    learning_rate: float = 1e-3
    """Largest learning rate of distillation."""
    learning_rate_min: float = 4e-4
    """Smallest one of SWA's cycle."""
    swa: Literal["cyclical", "constant", "none"] = "cyclical"
    """Stochastic weight averaging: cyclical (poster), constant (released code), none."""
    swa_cycle: int = 25
    """Steps per cycle (a snapshot at the end of each)."""
    swa_start: int = 500
    """constant: steps before the first snapshot; cyclical: likewise."""
    draws: int = 1
    """Monte-Carlo samples of each ensemble member whose weights have a distribution (or dropout)."""
    momentum: float = 0.9
    """Momentum of the distilling SGD."""
    weight_decay: float = 1e-5
    """Weight decay of the distilling SGD."""
    reduction: Literal["batch", "batch-classes"] = "batch"
    """KL(teacher | student) averaged over the examples (batch), or over examples x classes (released code: C times smaller)."""
    released_scale: float = 0.1
    """gaussian-released: factor on the standard deviation of the clients' directions."""
    refresh_batchnorm: bool = True
    """Whether batch-norm statistics of the averaged student are re-estimated on the server's inputs."""


@dataclass(frozen=True)
class Privacy:
    """Client-level differential privacy: each client's move is clipped, noise is added to the sum."""

    clip: float = 0.0
    """Largest norm of one client's relative move (0: no differential privacy)."""
    noise: float = 0.0
    """Noise multiplier: standard deviation of the Gaussian noise on the sum, in units of the clip."""
    delta: float = 1e-5
    """delta of the (epsilon, delta) guarantee reported each round."""


@dataclass(frozen=True)
class Evaluation:
    """When and how the global model is judged."""

    every: int = 1
    """Evaluate after every n-th round (and always after the last)."""
    samples: int = 25
    """Monte-Carlo samples of the network."""
    batch_size: int = 1000
    """Examples per forward pass."""
    draws: Literal["per_example", "per_pass"] = "per_example"
    """Whether the examples of a pass share one draw of the weights (per_pass) or not (per_example)."""
    bins: int = 15
    """Bins of the calibration error."""
    select: Literal["nll", "accuracy"] = "nll"
    """Validation metric that chooses the best round (never the test set)."""
    refresh_batchnorm: bool = False
    """Whether batch-norm statistics of the global model are re-estimated on the server's data before evaluation."""


@dataclass(frozen=True)
class Engine:
    """How the simulation uses the machine; it never changes what is computed beyond rounding."""

    device: str = "auto"
    """cpu, cuda, cuda:1, or auto (cuda where there is one)."""
    lanes: int = 0
    """Clients trained together: 1 is the plain loop, 0 picks by measuring."""
    precision: Literal["float32", "bf16"] = "float32"
    """Arithmetic of the forward and backward pass; parameters and optimiser are always float32."""
    compile: bool = False
    """Whether the step is compiled and captured in a CUDA graph (GPU only)."""
    workers: int = 0
    """CPU: processes, one thread each, that share out the clients of a plain loop (1: this process alone; 0: picks where
    lanes is 0, else 1)."""


@dataclass(frozen=True)
class Sonar:
    """Passive sonar: how recordings become pictures. Used by sonar data sets only."""

    picture: Literal["logmel", "lofar", "demon", "waveform"] = "logmel"
    """logmel; lofar (narrow-band, spectrally normalised); demon (envelope spectrum); waveform (for the 1-D network)."""
    sample_rate: int = 16000
    """Rate every recording is resampled to."""
    seconds: float = 3.0
    """Length of a segment."""
    overlap: float = 0.5
    """Share by which segments overlap."""
    low: float = 0.0
    """Lower edge of the band that reaches the picture, Hz (0: the picture's own: logmel and waveform 20, lofar 10, demon 1000)."""
    high: float = 0.0
    """Upper edge of that band, Hz (0: the picture's own: half the sample rate, lofar 1000, demon 0.9 of half)."""
    bands: int = 0
    """Rows of the picture (0: its own: logmel 64, lofar 128, demon 16 carriers)."""
    frames: int = 0
    """Columns of the picture (0: its own: logmel 64, lofar 32, demon 96 modulation rates)."""
    resolution: float = 2.0
    """lofar: spacing of the frequency bins, Hz."""
    channel: int = -1
    """Channel of a multi-channel file, from 0 (-1: the mean of all)."""
    layout: Literal["auto", "folder", "deepship", "shipsear", "watkins"] = "auto"
    """How a folder names class, recording and vessel (auto: recognised)."""
    classes: tuple[str, ...] = ()
    """The classes in order (empty: those found, sorted); nodes that read their own folders need them to number alike."""
    unseen: tuple[str, ...] = ()
    """Classes kept out of training and test and used as out-of-distribution sounds (synthetic sea: empty means submarine and waterjet)."""
    test: float = 0.25
    """Share of the recordings held out for the test, by whole recordings and vessels."""
    folds: int = 0
    """Cross-validation: when positive, the recordings are dealt into this many folds and one of them is the test."""
    fold: int = 0
    """Cross-validation: which fold is the test, from 0."""
    cache: bool = True
    """Whether pictures are kept in the cache folder, by content of the file and settings of the picture."""
    recordings: int = 12
    """Synthetic sea: recordings per vessel class and site."""
    sites: int = 10
    """Synthetic sea: listening sites."""
    length: float = 6.0
    """Synthetic sea: seconds per recording."""
    traffic: float = 0.0
    """Synthetic sea: Dirichlet concentration of the vessel classes at each site (0: all alike; small: unequal)."""
    snr: tuple[float, float] = (3.0, 18.0)
    """Synthetic sea: signal-to-noise ratios are drawn between these, dB in the band from 20 Hz to half the rate."""


@dataclass(frozen=True)
class Transport:
    """How posteriors travel between machines and how long the server waits. Used over Flower only."""

    wire: Literal["float32", "bf16", "int8"] = "float32"
    """What clients send: every bit (float32), or coordinates relative to the global posterior in 16 or 8 bits."""
    nodes: int = 0
    """Nodes to wait for before the first round (0: as many as it takes to host every client)."""
    wait: float = 600.0
    """Seconds to wait for nodes: before the first round, and in a round for those missing from the quorum."""
    mask_bits: int = 64
    """Bits of a masked number (fusion.private), 32 or 64: 64 never overflows; 32 halves the traffic and limits the range."""


@dataclass(frozen=True)
class Experiment:
    """One federated experiment, completely: run it twice and the result is the same."""

    name: str = "experiment"
    """A short name; run directories begin with it."""
    seed: int = 0
    """Seed of everything: partition, initial weights, client sampling, shuffles, noise."""
    rounds: int = 20
    """Rounds of the federation."""
    checkpoint_every: int = 1
    """Write a checkpoint after every n-th round."""
    data: Data = field(default_factory=Data)
    partition: Partition = field(default_factory=Partition)
    model: Model = field(default_factory=Model)
    objective: Objective = field(default_factory=Objective)
    local: Local = field(default_factory=Local)
    schedule: Schedule = field(default_factory=Schedule)
    participation: Participation = field(default_factory=Participation)
    pretrain: Pretrain = field(default_factory=Pretrain)
    fusion: Fusion = field(default_factory=Fusion)
    distill: Distill = field(default_factory=Distill)
    privacy: Privacy = field(default_factory=Privacy)
    evaluation: Evaluation = field(default_factory=Evaluation)
    engine: Engine = field(default_factory=Engine)
    sonar: Sonar = field(default_factory=Sonar)
    transport: Transport = field(default_factory=Transport)
