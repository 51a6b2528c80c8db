# SPDX-License-Identifier: Apache-2.0
"""On the path of processes that tests start: what their interpreters do first."""

from tests.harness.cpu_info import use_known

use_known()
