"""The paper's recoverability experiment in small: a frozen, trained net wins its channels back by the task loss alone.

BatchNorm runs in train mode (statistics of the batch), in the search and where accuracy is measured.
"""

from __future__ import annotations

import pytest
from examples.recoverability import recover


@pytest.mark.slow
def test_a_frozen_net_wins_its_channels_back() -> None:
    found = recover(train_epochs=8, epochs=14)
    assert found.macs_shares[0] < 0.1 and found.accuracies[0] < 0.3  # random alphas keep next to nothing
    assert found.macs_shares[-1] >= 0.9
    assert found.recovered >= found.trained - 0.01
    assert found.trained > 0.97
    assert found.frozen


@pytest.mark.slow
def test_nothing_comes_back_for_wrong_labels() -> None:
    """The climb above is not what large steps do anyway: these channels serve the true labels only."""
    assert max(recover(train_epochs=8, epochs=6, wrong_labels=True).macs_shares) < 0.2
