// SPDX-License-Identifier: Apache-2.0
#include "device_model.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

namespace fuyou {
namespace {

// Times beyond a year are cut to it: they would overflow the clock when added up.
IoClock::duration to_duration(double secs)
{
    constexpr double kLongestSecs = 3600.0 * 24 * 365;
    return std::chrono::duration_cast<IoClock::duration>(
        std::chrono::duration<double>(std::min(secs, kLongestSecs)));
}

bool matches(const IoFault& fault, IoKind kind, const IoExtent& extent)
{
    return fault.kind == kind && extent.num_bytes > 0 &&
           (fault.fd == -1 || fault.fd == extent.fd) && extent.offset < fault.offset_end &&
           extent.offset + extent.num_bytes > fault.offset_begin;
}

}  // namespace

void DeviceModel::set_throttle(double read_bytes_per_sec, double write_bytes_per_sec)
{
    for (const double rate : {read_bytes_per_sec, write_bytes_per_sec}) {
        if (!std::isfinite(rate) || rate < 0.0) {
            throw std::invalid_argument(
                "a throttle must be a finite number of bytes per second, 0 for none; got " +
                std::to_string(rate));
        }
    }
    read_bytes_per_sec_ = read_bytes_per_sec;
    write_bytes_per_sec_ = write_bytes_per_sec;
    free_at_ = IoClock::time_point();
}

void DeviceModel::add_fault(const IoFault& fault)
{
    if (fault.effect == IoFault::Effect::kError && fault.error <= 0) {
        throw std::invalid_argument("an injected error must be a positive errno; got " +
                                    std::to_string(fault.error));
    }
    if (!std::isfinite(fault.delay_secs) || fault.delay_secs < 0.0) {
        throw std::invalid_argument("an injected delay must be finite and >= 0 seconds; got " +
                                    std::to_string(fault.delay_secs));
    }
    rules_.push_back({fault});
}

void DeviceModel::clear_faults()
{
    rules_.clear();
}

PieceFate DeviceModel::admit(IoKind kind, const IoExtent& extent, IoClock::time_point now,
                             IoClock::time_point* not_before)
{
    *not_before = now;
    // One device serves both lanes in turn: the time of reads and writes adds up.
    const double rate = kind == IoKind::kRead ? read_bytes_per_sec_ : write_bytes_per_sec_;
    if (rate > 0.0) {
        free_at_ =
            std::max(free_at_, now) + to_duration(static_cast<double>(extent.num_bytes) / rate);
        *not_before = free_at_;
    }
    PieceFate fate;
    bool is_held = false;
    for (Rule& rule : rules_) {
        const IoFault& fault = rule.fault;
        if (!matches(fault, kind, extent)) {
            continue;
        }
        const std::uint64_t index = rule.num_matched++;
        if (index < fault.first || index - fault.first >= fault.count) {
            continue;
        }
        switch (fault.effect) {
            case IoFault::Effect::kError:
                fate.error = fault.error;
                break;
            case IoFault::Effect::kShort:
                fate.is_short = true;
                break;
            case IoFault::Effect::kDelay:
                *not_before += to_duration(fault.delay_secs);
                break;
            case IoFault::Effect::kHold:
                is_held = true;
                break;
        }
    }
    if (is_held) *not_before = kHeld;
    return fate;
}

}  // namespace fuyou
