// SPDX-License-Identifier: Apache-2.0
// What simulator, dispatcher, bounds and planner share: the costs of one iteration and orders of actions.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <vector>

namespace adaptra {

constexpr double kNever = std::numeric_limits<double>::infinity();
// Released fractions are not exact in binary: a cap counts as kept up to this much of one activation.
constexpr double kCapTolerance = 1e-9;

enum Kind : int { kForward = 0, kBackward = 1, kBackwardInput = 2, kBackwardWeight = 3 };

// One action of a known stage in one word, so that an order is a flat array.
using Code = std::int32_t;

inline Kind kind_of(Code code) { return static_cast<Kind>(code & 3); }
inline bool sends_gradient(Kind kind) { return kind == kBackward || kind == kBackwardInput; }

using Order = std::vector<Code>;
using Orders = std::vector<Order>;

struct Link {
    double latency = 0.0;  // 0 for rendezvous links, which carry one message at a time: it is part of the occupancy
    double occupancy = 0.0;
    bool rendezvous = false;
};

// The fields mirror adaptra_megatron.schedule.costs.Costs; tables are indexed [stage * chunks + chunk].
struct Problem {
    int stages = 0;
    int chunks = 0;
    int micro_batches = 0;
    std::vector<double> forward;
    std::vector<double> backward_input;
    std::vector<double> backward_weight;
    std::vector<double> backward;   // input and weight gradient in one go
    bool backward_differs = false;  // whether that is anywhere not their sum
    std::vector<Link> to_next;      // [stage]: the directed link to the next rank (from the last one to 0)
    std::vector<Link> to_previous;  // [stage]: the directed link to the previous rank (from 0 to the last one)
    std::vector<double> cap;        // [stage]; kNever: no cap
    std::vector<double> released;   // [stage]: fraction of an activation that the input gradient gives back; below 0: adds
    bool shared_queue = false;      // whether a stage's computation and rendezvous transfers start in the order of issue

    bool has_rendezvous() const {
        const auto is_one = [](const Link& link) { return link.rendezvous; };
        return std::any_of(to_next.begin(), to_next.end(), is_one) ||
               std::any_of(to_previous.begin(), to_previous.end(), is_one);
    }

    // Whether anything can stand in front of computation.
    bool queue_matters() const { return shared_queue && has_rendezvous(); }

    int virtual_stages() const { return stages * chunks; }
    int stage_of(int virtual_stage) const { return virtual_stage % stages; }
    int chunk_of(int virtual_stage) const { return virtual_stage / stages; }
    int row(int virtual_stage) const { return stage_of(virtual_stage) * chunks + chunk_of(virtual_stage); }
    std::size_t slots() const { return static_cast<std::size_t>(virtual_stages()) * micro_batches; }

    Code code(Kind kind, int chunk, int micro_batch) const { return ((micro_batch * chunks + chunk) << 2) | kind; }
    // Divisions are what a simulation of one chunk would spend most of its time on.
    int chunk_in(Code code) const { return chunks == 1 ? 0 : (code >> 2) % chunks; }
    int micro_batch_in(Code code) const { return chunks == 1 ? code >> 2 : (code >> 2) / chunks; }

    double seconds(Kind kind, int row) const {
        switch (kind) {
            case kForward: return forward[row];
            case kBackward: return backward[row];
            case kBackwardInput: return backward_input[row];
            default: return backward_weight[row];
        }
    }

    // Of two stages, next and previous are the same rank: both kinds of message share one directed link.
    int link_to_next(int stage) const { return 2 * stage; }
    int link_to_previous(int stage) const { return stages == 2 ? 2 * stage : 2 * stage + 1; }
    int links() const { return 2 * stages; }
    int target_of(int link) const { return (link / 2 + (link % 2 ? stages - 1 : 1)) % stages; }
    // From the previous and from the next stage.
    std::array<int, 2> links_into(int stage) const {
        return {link_to_next((stage + stages - 1) % stages), link_to_previous((stage + 1) % stages)};
    }
    // The link that the message of an action takes; -1: what it makes stays on its stage.
    int link_out(Kind kind, int virtual_stage) const {
        const int stage = stage_of(virtual_stage);
        if (stages == 1 || kind == kBackwardWeight) return -1;
        if (kind == kForward) return virtual_stage + 1 < virtual_stages() ? link_to_next(stage) : -1;
        return virtual_stage > 0 ? link_to_previous(stage) : -1;
    }
    const Link& link(int index) const { return index % 2 ? to_previous[index / 2] : to_next[index / 2]; }
};

// Activations a stage holds, from counts (not a running sum), so that every caller gets the same rounding.
inline double held(int forwards, int inputs, int weights, double released) {
    return forwards - (released * inputs + (1.0 - released) * weights);
}

// What an input gradient adds to the activations held, where it releases less than nothing.
inline double added_by_input(double released) { return std::max(0.0, -released); }

// Most activations that a stage holds at once: a static function of its order.
inline double peak_of(const Order& order, double released) {
    int forwards = 0, inputs = 0, weights = 0;
    double peak = 0.0;
    for (const Code code : order) {
        const Kind kind = kind_of(code);
        forwards += kind == kForward;
        inputs += sends_gradient(kind);
        weights += kind == kBackward || kind == kBackwardWeight;
        peak = std::max(peak, held(forwards, inputs, weights, released));
    }
    return peak;
}

inline std::vector<double> peaks_of(const Orders& orders, const std::vector<double>& released) {
    std::vector<double> peaks;
    for (std::size_t stage = 0; stage < orders.size(); ++stage) peaks.push_back(peak_of(orders[stage], released[stage]));
    return peaks;
}

// Where the messages and results of one iteration are, by virtual stage and micro-batch; kNever: not known yet.
struct Messages {
    std::vector<double> activation;  // arrival of the activation that F needs
    std::vector<double> gradient;    // arrival of the gradient that B needs (last virtual stage: end of its own F)
    std::vector<double> input_end;   // end of the input gradient that W needs
    std::vector<double> link_free;   // by link index: the moment from which the link can take the next message

    void reset(const Problem& problem);
    // When what an action of `kind` waits for is there.
    double ready(const Problem& problem, Kind kind, int virtual_stage, int micro_batch) const {
        const int slot = virtual_stage * problem.micro_batches + micro_batch;
        switch (kind) {
            case kForward: return activation[slot];
            case kBackwardWeight: return input_end[slot];
            default: return gradient[slot];
        }
    }
    // Books what the action that ends at `end` produces. Returns the stage that now can know more, or -1.
    int deliver(const Problem& problem, Kind kind, int virtual_stage, int micro_batch, double end);

private:
    double send(const Problem& problem, int link, double end) {
        const Link& cost = problem.link(link);
        const double start = std::max(end, link_free[link]);
        link_free[link] = start + cost.occupancy;
        return link_free[link] + cost.latency;
    }
};

inline void Messages::reset(const Problem& problem) {
    activation.assign(problem.slots(), kNever);
    std::fill_n(activation.begin(), problem.micro_batches, 0.0);
    gradient.assign(problem.slots(), kNever);
    input_end.assign(problem.slots(), kNever);
    link_free.assign(problem.links(), 0.0);
}

inline int Messages::deliver(const Problem& problem, Kind kind, int virtual_stage, int micro_batch, double end) {
    const int count = problem.micro_batches;
    const int slot = virtual_stage * count + micro_batch;
    const int stage = problem.stage_of(virtual_stage);
    if (kind == kBackwardWeight) return -1;
    if (kind == kForward) {
        if (virtual_stage + 1 == problem.virtual_stages()) {
            gradient[slot] = end;
            return -1;
        }
        const int target = stage + 1 == problem.stages ? 0 : stage + 1;
        activation[slot + count] = target == stage ? end : send(problem, problem.link_to_next(stage), end);
        return target;
    }
    if (kind == kBackwardInput) input_end[slot] = end;
    if (virtual_stage == 0) return -1;
    const int target = stage == 0 ? problem.stages - 1 : stage - 1;
    gradient[slot - count] = target == stage ? end : send(problem, problem.link_to_previous(stage), end);
    return target;
}

}  // namespace adaptra
