// SPDX-License-Identifier: Apache-2.0
// Why these bounds hold for every routing and every order. A stage is as many machines as it has live cells; each
// micro-batch takes F, I and W at one of them. Where a whole backward takes less than I and W, these take less (see
// `eased` in bounds.cpp). Of its n micro-batches, a cell does
//  - all work between the arrival of the first activation at the stage and the end,
//  - all I and W after the first gradient can have come back,
//  - all F and I before what remains after its last I: its W, and the way of the gradient to the first stage,
//  - all I between these.
// Each is "n times some seconds and what comes before and after take no more than T", so T limits n; all cells' n
// together are the job's micro-batches. Micro-batches that differ are weighted: with any weights y of the cells, the sum
// over micro-batches of the least y * seconds over cells is at most T times the sum of y.
// Where each stage starts its next iteration itself, what lies between its own first and last action counts, and of
// other stages what has to lie between those of the first stage.
#include "routed_bound.hpp"

#include <cmath>

namespace adaptra {
namespace {

constexpr double kRounding = 1.0 - 1e-12;
constexpr double kCountTolerance = 1e-9;
constexpr int kBisections = 100;

class RoutedBounds {
public:
    RoutedBounds(const RoutedProblem& problem, bool split);
    RoutedBound best() const;

private:
    struct Row {
        double forward = kNever, input = kNever, weight = kNever;  // seconds of a factor of 1
    };
    // A number of micro-batches takes `per_job(row)` each, with `outside` before and after.
    struct Window {
        bool forward, input, weight;
        double outside;
        double per_job(const Row& row) const {
            return forward * row.forward + input * row.input + weight * row.weight;
        }
    };

    double stage_bound(int stage) const;
    double counted(int stage, const std::vector<Window>& windows) const;
    double weighted(int stage, const Window& window) const;
    std::vector<Window> windows(int stage) const;
    double least_factor(Kind kind, int stage) const;
    double least_link(int stage, bool back) const;
    double way_of_longest() const;

    const RoutedProblem& problem_;
    const bool split_;
    std::vector<std::vector<Row>> rows_;        // [stage]: of live cells
    std::vector<Row> least_;                    // [stage]: least seconds of any micro-batch at any cell
    std::vector<double> link_next_, link_back_; // [stage]: least seconds to the next stage, to the previous one
};

RoutedBounds::RoutedBounds(const RoutedProblem& problem, bool split)
    : problem_(problem), split_(split), rows_(problem.stages), least_(problem.stages) {
    for (int cell = 0; cell < problem.cells(); ++cell) {
        if (!problem.live[cell]) continue;
        const double* seconds = &problem.per_cell[static_cast<std::size_t>(cell) * 4];
        Row row{seconds[kForward], seconds[kBackwardInput], seconds[kBackwardWeight]};
        const double whole = problem.whole_given ? seconds[kBackward] : row.input + row.weight;
        if (!split) {
            row.input = whole;
            row.weight = 0.0;
        } else if (whole < row.input + row.weight) {
            row.input = std::min(row.input, whole);
            row.weight = whole - row.input;
        }
        rows_[problem.stage_of(cell)].push_back(row);
    }
    for (int stage = 0; stage < problem.stages; ++stage) {
        Row& least = least_[stage];
        for (const Row& row : rows_[stage]) {
            least.forward = std::min(least.forward, row.forward);
            least.input = std::min(least.input, row.input);
            least.weight = std::min(least.weight, row.weight);
        }
        least.forward *= least_factor(kForward, stage);
        least.input *= least_factor(kBackwardInput, stage);
        least.weight *= least_factor(kBackwardWeight, stage);
        link_next_.push_back(stage + 1 < problem.stages ? least_link(stage, false) : 0.0);
        link_back_.push_back(stage > 0 ? least_link(stage, true) : 0.0);
    }
}

// Least factor of a kind; of I and W, where backwards may be either, the least of all, so that no kind is rated too long.
double RoutedBounds::least_factor(Kind kind, int stage) const {
    if (problem_.factor.empty()) return 1.0;
    double least = kNever;
    for (Job job = 0; job < problem_.jobs(); ++job) {
        least = std::min(least, problem_.factor_of(kind, stage, job));
        if (kind == kForward) continue;
        for (const Kind other : {kBackward, kBackwardInput, kBackwardWeight}) {
            if (other == kBackward ? problem_.whole_given : !split_ || problem_.whole_given) {
                least = std::min(least, problem_.factor_of(other, stage, job));
            }
        }
    }
    return least;
}

double RoutedBounds::least_link(int stage, bool back) const {
    double least = kNever;
    for (int replica = 0; replica < problem_.replicas; ++replica) {
        least = std::min(least, problem_.own[problem_.cell(replica, stage) * 2 + back].transfer());
    }
    for (const auto& [ends, link] : problem_.given) {
        const int source = static_cast<int>(ends / problem_.cells()), target = static_cast<int>(ends % problem_.cells());
        const bool here = problem_.stage_of(source) == stage && problem_.stage_of(target) == (back ? stage - 1 : stage + 1);
        if (here) least = std::min(least, link.transfer());
    }
    return least;
}

std::vector<RoutedBounds::Window> RoutedBounds::windows(int stage) const {
    double way = 0.0, back = least_[0].weight + problem_.sync[0];
    for (int before = 0; before < stage; ++before) way += least_[before].forward + link_next_[before];
    double round_trip = least_[stage].forward;
    for (int after = stage + 1; after < problem_.stages; ++after) {
        round_trip += link_next_[after - 1] + least_[after].forward + least_[after].input + link_back_[after];
    }
    for (int before = stage; before > 0; --before) back += link_back_[before] + least_[before - 1].input;
    const double sync = problem_.sync[stage], tail = least_[stage].weight + sync;
    const double head = problem_.staggered ? 0.0 : way;
    // The last two: within the time that the first stage is at work, from its first F to its last W.
    return {{true, true, true, head + sync},
            {true, true, false, head + tail},
            {false, true, true, head + round_trip + sync},
            {false, true, false, head + round_trip + tail},
            {true, true, false, way + back},
            {false, true, false, way + round_trip + back}};
}

// The least T for which the cells' numbers of micro-batches, as T limits them, add up to the job's.
double RoutedBounds::counted(int stage, const std::vector<Window>& windows) const {
    const auto number_within = [&](const Row& row, double seconds) {
        double number = problem_.jobs();
        for (const Window& window : windows) {
            const double per_job = window.per_job(row), room = seconds - window.outside;
            if (room < 0.0 && number > 0.0) number = 0.0;
            if (per_job > 0.0) number = std::min(number, std::floor(std::max(0.0, room) / per_job + kCountTolerance));
        }
        return number;
    };
    const auto enough = [&](double seconds) {
        double number = 0.0;
        for (const Row& row : rows_[stage]) number += number_within(row, seconds);
        return number >= problem_.jobs();
    };
    double low = 0.0, high = 1e-9;
    while (!enough(high)) high *= 2.0;
    for (int step = 0; step < kBisections && low < high * kRounding; ++step) {
        (enough((low + high) / 2) ? high : low) = (low + high) / 2;
    }
    // Before some cell can take one more than it can within `low`, there are too few: exact, where bisection rounds.
    double exact = kNever;
    for (const Row& row : rows_[stage]) {
        const double next = number_within(row, low) + 1.0;
        double until = 0.0;
        for (const Window& window : windows) until = std::max(until, window.outside + next * window.per_job(row));
        exact = std::min(exact, until);
    }
    return std::max(low, exact);
}

double RoutedBounds::weighted(int stage, const Window& window) const {
    double weights = 0.0, work = 0.0;
    for (const Row& row : rows_[stage]) {
        const double per_job = window.per_job(row);
        if (per_job <= 0.0) return 0.0;
        weights += 1.0 / per_job;
    }
    for (Job job = 0; job < problem_.jobs(); ++job) {
        const double forward = problem_.factor_of(kForward, stage, job);
        double input = problem_.factor_of(kBackwardInput, stage, job);
        double weight = problem_.factor_of(kBackwardWeight, stage, job);
        if (problem_.whole_given) {
            // Which kind of backward it takes is open: the least of the factors is right for any.
            input = weight = std::min({input, weight, problem_.factor_of(kBackward, stage, job)});
        } else if (!split_) {
            input = std::min(input, weight);
        }
        double least = kNever;
        for (const Row& row : rows_[stage]) {
            const double seconds = window.per_job({forward * row.forward, input * row.input, weight * row.weight});
            least = std::min(least, seconds / window.per_job(row));
        }
        work += least;
    }
    return window.outside + work / weights;
}

double RoutedBounds::stage_bound(int stage) const {
    const std::vector<Window> all = windows(stage);
    if (problem_.factor.empty()) return counted(stage, all);
    double bound = 0.0;
    for (const Window& window : all) bound = std::max(bound, weighted(stage, window));
    return bound;
}

// The way of one micro-batch through all stages and back.
double RoutedBounds::way_of_longest() const {
    double longest = 0.0;
    for (Job job = 0; job < (problem_.factor.empty() ? 1 : problem_.jobs()); ++job) {
        double way = least_[0].weight + problem_.sync[0];
        for (int stage = 0; stage < problem_.stages; ++stage) {
            double forward = kNever;
            for (const Row& row : rows_[stage]) forward = std::min(forward, row.forward);
            way += forward * problem_.factor_of(kForward, stage, job) + least_[stage].input;
            way += link_next_[stage] + link_back_[stage];
        }
        longest = std::max(longest, way);
    }
    return longest;
}

RoutedBound RoutedBounds::best() const {
    RoutedBound best{way_of_longest(), 0};
    for (int stage = 0; stage < problem_.stages; ++stage) {
        const double seconds = stage_bound(stage);
        if (seconds > best.seconds) best = {seconds, stage};
    }
    best.seconds *= kRounding;
    return best;
}

}  // namespace

RoutedBound routed_bound(const RoutedProblem& problem, bool split) { return RoutedBounds(problem, split).best(); }

}  // namespace adaptra
