// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pipeline/update_team.h"

inline fuyou::UpdateTeam& team_of_two()
{
    static fuyou::UpdateTeam team(2);
    return team;
}
