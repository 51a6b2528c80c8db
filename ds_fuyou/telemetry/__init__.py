# SPDX-License-Identifier: Apache-2.0
"""What a run tells about itself: where every byte lives, and how much time the lanes worked unseen."""
