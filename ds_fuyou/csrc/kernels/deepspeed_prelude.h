// SPDX-License-Identifier: Apache-2.0
//
// DeepSpeed's CPU optimizer sources define the same names in every file. Each is compiled inside a
// namespace of its own; every header they include is included here first, outside of it.
#pragma once

#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <stdio.h>
#include <time.h>
#include <torch/extension.h>

#include <algorithm>
#include <cassert>
#include <cerrno>
#include <cmath>
#include <condition_variable>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif
#if defined(__ARM_NEON)
#include <arm_neon.h>
#endif
#if defined(__ARM_FEATURE_SVE)
#include <arm_sve.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#endif

// Some of the sources bind a Python module of their own; here it becomes an unused function.
#undef PYBIND11_MODULE
#define PYBIND11_MODULE(name, variable) \
    [[maybe_unused]] static void unused_binding(pybind11::module_& variable)

namespace fuyou {

// Whether Stock's update has a last argument that is a bool.
template <class Stock, class... Arguments>
auto takes_bool(int) -> decltype(std::declval<Stock&>().Step_8(std::declval<Arguments>()..., false),
                                 std::true_type());
template <class Stock, class... Arguments>
std::false_type takes_bool(...);

// One update by the stock optimizer in the calling thread. Newer versions start threads of their
// own for every call unless told not to; the caller has divided the work already.
template <class Stock, class... Arguments>
void step_here(Stock& optimizer, Arguments... arguments)
{
    if constexpr (decltype(takes_bool<Stock, Arguments&...>(0))::value) {
        optimizer.Step_8(arguments..., false);
    } else {
        optimizer.Step_8(arguments...);
    }
}

}  // namespace fuyou
