"""A federation of listeners, top to bottom: five sites, a Bayesian network, and an operator who is told what to hear.

    python examples/passive_sonar.py [FOLDER]

Without a folder a synthetic sea is made; with one, its recordings are read (class/recording.wav, or a CSV with the
columns file, class, recording, site). Training and test never share a recording or a ship, and no recording leaves
its site: each learns a distribution over the weights, the server fuses the distributions.
"""

import sys

import numpy as np

import fedbayes
from fedbayes import config, uncertainty
from fedbayes.data import load
from fedbayes.data.sonar import confusion, pool

source = sys.argv[1] if len(sys.argv) > 1 else "sonar-synthetic"
experiment = config.override(
    fedbayes.Experiment(name="passive-sonar", rounds=8),
    {
        "data.name": source,
        "data.augment": "sonar",  # time shift, gain, band noise, SpecAugment
        "data.scale": "none",
        "data.mean": "client",  # each site subtracts its own mean picture: its hydrophone does not show
        "sonar.picture": "demon",  # how the noise of the propeller beats; or logmel, lofar
        "sonar.sample_rate": 8000,
        "sonar.sites": 5,
        "sonar.recordings": 8,
        "partition.scheme": "column",
        "partition.column": "site",
        "partition.clients": 0,  # as many as there are sites
        "model.name": "spectrogram-cnn",
        "model.kind": "flipout",
        "objective.kl_weight": 0.1,
        "local.epochs": 3,
        "local.learning_rate": 4e-3,
        "fusion.rule": "nwa",
        "evaluation.every": 4,
        "evaluation.samples": 10,
        "evaluation.draws": "per_pass",  # one network hears a whole recording, so its doubt does not average away
    },
)

# What there is to learn from: pictures of segments, and who was heard where.
sea = load(experiment.data, sonar=experiment.sonar, seed=experiment.seed)
heard = sea.train.columns
if len(np.unique(heard["site"])) < 2:  # recordings without sites: share them out as they are, whole
    experiment = config.override(experiment, {"partition.column": "recording", "partition.clients": 4})
print(f"{len(sea.train)} segments of {len(np.unique(heard['recording']))} recordings; classes {', '.join(sea.classes)}")

result = fedbayes.run(experiment)

# One prediction per recording, with its uncertainty.
stored = np.load(result.path / "predictions-test.npz")
recordings = pool(stored["probabilities"], sea.test.columns["recording"], sea.test.labels)
print(f"\n{100 * recordings.accuracy:.0f} % of {len(recordings)} recordings named rightly, none of them heard before")
print(confusion(recordings.values["prediction"], recordings.labels, len(sea.classes)))

# The operator's queue: what to listen to first.
print("\nleast sure first:")
for number in recordings.order()[:8]:
    said = sea.classes[int(recordings.values["prediction"][number])]
    truth = sea.classes[int(recordings.labels[number])]
    print(
        f"  {recordings.names[number]:24} {said:10} {recordings.values['confidence'][number]:.2f}"
        f"  entropy {recordings.values['entropy'][number]:.2f}  {'right' if said == truth else 'wrong: ' + truth}"
    )
keep = uncertainty.accuracy_at(recordings.values["entropy"], recordings.correct, 0.8)
print(f"answering only for the surest 80 %: {100 * keep:.0f} % right")
print(f"pictures, sound and figures: {result.path / 'report.html'}")
