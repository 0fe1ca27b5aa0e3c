// SPDX-License-Identifier: Apache-2.0
// Why the delay holds for every schedule. Take from one what each micro-batch holds of a stage, and let nothing wait
// before or after the F of its last chunk there: earlier F start later, releases come sooner, so it holds a part of that
// at any moment. What it holds is then the same for all but for its start s >= 0. Choose moments P, 2P, .. nP at which a
// micro-batch that starts in [0, t) holds q or more, over all of them. Then m micro-batches that start there hold m q,
// and n caps are no less: if m q > n cap, the m-th starts at t or later.
// A micro-batch is held after its start and up to its release, so moments just before releases count the most.
#include "waves.hpp"

#include <cmath>

namespace adaptra {
namespace {

// In shares of the whole: what is held is taken to be `kShorter` shorter at both ends, which is more than rounding may
// move a moment by, and periods by more than that, so that where one holding ends as the next starts there is no gap.
constexpr double kShorter = 1e-9, kShorterPeriod = 4 * kShorter;
constexpr double kSliver = 1e-12;  // shortest part of a period that counts
constexpr double kLeastPeriod = 1.0 / 16;

double held_at(const std::vector<Holding>& holdings, double moment) {
    double held = 0.0;
    for (const Holding& holding : holdings) {
        if (holding.from < moment && moment <= holding.until) held += holding.size;
    }
    return held;
}

}  // namespace

Waves::Waves(const std::vector<Holding>& holdings, double cap) : cap_(cap + kCapTolerance) {
    double first = kNever, last = -kNever;
    for (const Holding& holding : holdings) {
        first = std::min(first, holding.from);
        last = std::max(last, holding.until);
    }
    const double whole = last - first;
    path_ = -first;
    if (cap < 1.0 || cap_ == kNever || whole <= 0.0) return;  // below 1 no schedule fits the cap
    std::vector<Holding> shorter;
    for (const Holding& holding : holdings) {
        const double from = (holding.from - first) / whole + kShorter, until = (holding.until - first) / whole - kShorter;
        if (holding.size > 0.0 && until > from) shorter.push_back({from, until, holding.size});
    }
    for (const Holding& holding : shorter) {
        const double period = holding.until - kShorterPeriod;
        if (period < kLeastPeriod) continue;
        Comb comb = comb_of(shorter, period);
        comb.period *= whole;
        for (double& seconds : comb.shortfall) seconds *= whole;
        if (comb.held > 0.0) combs_.push_back(std::move(comb));
    }
}

// Of a whole of 1.
Waves::Comb Waves::comb_of(const std::vector<Holding>& holdings, double period) const {
    std::vector<double> ends{0.0, period};  // of the parts of a period in which, at the same moments, the same is held
    for (const Holding& holding : holdings) {
        for (const double end : {holding.from, holding.until}) ends.push_back(std::fmod(end, period));
    }
    std::sort(ends.begin(), ends.end());
    const int moments = static_cast<int>(std::ceil(1.0 / period));
    Comb comb{period, kNever, std::vector<double>(moments + 1, 0.0)};
    const auto each = [&](auto&& use) {  // part and moments left: held at these
        for (std::size_t part = 0; part + 1 < ends.size(); ++part) {
            if (ends[part + 1] - ends[part] < kSliver) continue;
            double held = 0.0;
            for (int left = 1; left <= moments; ++left) {
                held += held_at(holdings, 0.5 * (ends[part] + ends[part + 1]) + (left - 1) * period);
                use(ends[part + 1], left, held);
            }
        }
    };
    each([&](double, int left, double held) {
        if (left == moments) comb.held = std::min(comb.held, held);
    });
    // The earliest start that holds less has `left` moments to come, the first of them after `end` or sooner.
    each([&](double end, int left, double held) {
        if (held < comb.held - kSliver) comb.shortfall[left] = std::max(comb.shortfall[left], (left - 1) * period + end);
    });
    for (int left = 1; left <= moments; ++left) comb.shortfall[left] = std::max(comb.shortfall[left], comb.shortfall[left - 1]);
    return comb;
}

double Waves::delay(int index) const {
    double delay = 0.0;
    for (const Comb& comb : combs_) {
        const int count = static_cast<int>(std::ceil((index + 1) * (comb.held - kSliver) / cap_)) - 1;
        if (count < 1) continue;
        const int left = std::min(count, static_cast<int>(comb.shortfall.size()) - 1);
        delay = std::max(delay, count * comb.period - comb.shortfall[left]);
    }
    return path_ + delay;
}

Waves waves_of(const Problem& problem, int stage, const std::vector<double>& elapsed) {
    const auto least = [&](const std::vector<double>& table, int v) {
        const auto begin = table.begin() + static_cast<std::ptrdiff_t>(problem.row(v)) * problem.width;
        return *std::min_element(begin, begin + problem.width);
    };
    const int last = problem.virtual_stages() - 1, core = problem.virtual_stage(stage, problem.chunks - 1);
    std::vector<double> start(last + 1), end(last + 1);  // of F, and of I
    for (int v = core; v > 0; --v) start[v - 1] = start[v] - least(problem.forward, v - 1) - problem.transfer(problem.activation_link[v - 1]);
    for (int v = core; v < last; ++v) start[v + 1] = start[v] + least(problem.forward, v) + problem.transfer(problem.activation_link[v]);
    for (int v = last; v >= 0; --v) {
        const double gradient =
            v == last ? start[v] + least(problem.forward, v) : end[v + 1] + problem.transfer(problem.gradient_link[v + 1]);
        end[v] = gradient + least(elapsed, v);
    }
    const double released = problem.released[stage];
    std::vector<Holding> holdings;
    for (int chunk = 0; chunk < problem.chunks; ++chunk) {
        const int v = problem.virtual_stage(stage, chunk);
        holdings.push_back({start[v], end[v], released});
        holdings.push_back({start[v], end[v] + least(problem.backward_weight, v), 1.0 - released});
    }
    return Waves(holdings, problem.cap[stage]);
}

}  // namespace adaptra
