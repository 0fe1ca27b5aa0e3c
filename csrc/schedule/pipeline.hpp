// SPDX-License-Identifier: Apache-2.0
// What simulator, dispatcher, bounds and planner share: the costs of one iteration and orders of actions.
#pragma once

#include <algorithm>
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
// Set in a forward that runs as one with the backward right behind it in its stage's order: a combined action. To
// ignore it means to run the forward first, then the backward.
constexpr Code kCombined = 4;
constexpr int kCodeShift = 3;  // above kind and mark: micro-batch and chunk
// Actions from one with this code on that run as one.
inline int unit_size(Code code) { return code >= 0 && (code & kCombined) ? 2 : 1; }
inline bool sends_gradient(Kind kind) { return kind == kBackward || kind == kBackwardInput; }

using Order = std::vector<Code>;
using Orders = std::vector<Order>;

// A directed link between two stages.
struct Link {
    double latency = 0.0;  // 0 for rendezvous links, which carry one message at a time: it is part of the occupancy
    double occupancy = 0.0;
    bool rendezvous = false;
    int source = -1, target = -1;
};

// The fields mirror adaptra_megatron.schedule.costs.Costs; tables are indexed [(stage * chunks + chunk) * width], plus
// the micro-batch where these differ.
struct Problem {
    int stages = 0;
    int chunks = 0;
    int micro_batches = 0;
    std::vector<double> forward;
    std::vector<double> backward_input;
    std::vector<double> backward_weight;
    std::vector<double> backward;   // input and weight gradient in one go
    bool backward_differs = false;  // whether that is anywhere not their sum
    int width = 1;                  // entries of a table per stage and chunk: 1, or as many as micro-batches
    int step = 0;                   // from one micro-batch's entry to the next one's: 0 or 1
    std::vector<int> stage_at;      // [virtual stage]: the stage that runs it, its chunks in the order of the model
    std::vector<Link> links;        // all that messages between stages take
    std::vector<double> cap;        // [stage]; kNever: no cap
    std::vector<double> released;   // [stage]: fraction of an activation that the input gradient gives back; below 0: adds
    bool shared_queue = false;      // whether a stage's computation and rendezvous transfers start in the order of issue
    bool serial_queue = false;      // whether each of them also waits there for the end of the one before
    std::vector<double> combined_saving;  // [(stage * chunks + chunk of F) * chunks + chunk of B]; empty: nothing is combined
    double combined_sends_at = 1.0;       // part of a combined action's time after which its messages leave

    // What follows from stage_at and links, by `route`.
    std::vector<int> virtual_at;                      // [stage * chunks + chunk]
    std::vector<int> row_at;                          // [virtual stage]: stage * chunks + chunk
    std::vector<int> activation_link, gradient_link;  // [virtual stage]: of what its F and B make; -1: stays on its stage
    std::vector<std::vector<int>> incoming;           // [stage]: links to it

    void route();

    bool has_rendezvous() const {
        return std::any_of(links.begin(), links.end(), [](const Link& link) { return link.rendezvous; });
    }

    // Returns whether orders must be replayed as launched: whether anything can stand in front of computation, or a
    // transfer can wait for its receive, which is posted behind a combined action during which the message is made.
    bool launch_matters() const {
        return has_rendezvous() && (shared_queue || (!combined_saving.empty() && combined_sends_at < 1.0));
    }

    int virtual_stages() const { return stages * chunks; }
    int virtual_stage(int stage, int chunk) const { return virtual_at[stage * chunks + chunk]; }
    int stage_of(int virtual_stage) const { return stage_at[virtual_stage]; }
    int row(int virtual_stage) const { return row_at[virtual_stage]; }
    int chunk_of(int virtual_stage) const { return row(virtual_stage) - stage_of(virtual_stage) * chunks; }
    std::size_t slots() const { return static_cast<std::size_t>(virtual_stages()) * micro_batches; }

    Code code(Kind kind, int chunk, int micro_batch) const { return ((micro_batch * chunks + chunk) << kCodeShift) | kind; }
    // Divisions are what a simulation of one chunk would spend most of its time on.
    int chunk_in(Code code) const { return chunks == 1 ? 0 : (code >> kCodeShift) % chunks; }
    int micro_batch_in(Code code) const { return chunks == 1 ? code >> kCodeShift : (code >> kCodeShift) / chunks; }

    double seconds(Kind kind, int row, int micro_batch) const {
        const std::size_t entry = static_cast<std::size_t>(row) * width + micro_batch * step;
        switch (kind) {
            case kForward: return forward[entry];
            case kBackward: return backward[entry];
            case kBackwardInput: return backward_input[entry];
            default: return backward_weight[entry];
        }
    }
    double seconds(Code code, int stage) const {
        return seconds(kind_of(code), stage * chunks + chunk_in(code), micro_batch_in(code));
    }
    // What combining saves, against F and whole B one after the other.
    double saving(int stage, Code forward, Code backward) const {
        if (combined_saving.empty()) return 0.0;
        const int row = stage * chunks + chunk_in(forward);
        return combined_saving[row * chunks + chunk_in(backward)] *
               (seconds(forward, stage) + seconds(kBackward, stage * chunks + chunk_in(backward), micro_batch_in(backward)));
    }
    double combined_seconds(int stage, Code forward, Code backward) const {
        const double one = seconds(forward, stage), other = seconds(backward, stage);
        return std::max({one, other, one + other - saving(stage, forward, backward)});
    }
    double mean_seconds(Kind kind, int row) const {
        if (step == 0) return seconds(kind, row, 0);
        double total = 0.0;
        for (int micro_batch = 0; micro_batch < micro_batches; ++micro_batch) total += seconds(kind, row, micro_batch);
        return total / micro_batches;
    }

    // The link that the message of an action takes; -1: what it makes stays on its stage.
    int link_out(Kind kind, int virtual_stage) const {
        if (kind == kBackwardWeight) return -1;
        return kind == kForward ? activation_link[virtual_stage] : gradient_link[virtual_stage];
    }
    // Seconds on the way of a message that finds its link free; -1: none.
    double transfer(int link) const { return link < 0 ? 0.0 : links[link].occupancy + links[link].latency; }
    // The link between two stages; -1: no message takes that way.
    int link_between(int source, int target) const {
        for (const int link : incoming[target]) {
            if (links[link].source == source) return link;
        }
        return -1;
    }
};

inline void Problem::route() {
    std::vector<int> placed(stages, 0);
    virtual_at.assign(virtual_stages(), -1);
    row_at.assign(virtual_stages(), -1);
    incoming.assign(stages, {});
    for (int v = 0; v < virtual_stages(); ++v) {
        row_at[v] = stage_at[v] * chunks + placed[stage_at[v]]++;
        virtual_at[row_at[v]] = v;
    }
    for (std::size_t link = 0; link < links.size(); ++link) incoming[links[link].target].push_back(static_cast<int>(link));
    activation_link.assign(virtual_stages(), -1);
    gradient_link.assign(virtual_stages(), -1);
    for (int v = 1; v < virtual_stages(); ++v) {
        activation_link[v - 1] = link_between(stage_at[v - 1], stage_at[v]);
        gradient_link[v] = link_between(stage_at[v], stage_at[v - 1]);
    }
}

// Activations a stage holds, from counts (not a running sum), so that every caller gets the same rounding.
inline double held(int forwards, int inputs, int weights, double released) {
    return forwards - (released * inputs + (1.0 - released) * weights);
}

// What an input gradient adds to the activations held, where it releases less than nothing.
inline double added_by_input(double released) { return std::max(0.0, -released); }

// Most activations that a stage holds at once: a static function of its order. Calls (below 0) hold none.
inline double peak_of(const Order& order, double released) {
    int forwards = 0, inputs = 0, weights = 0;
    double peak = 0.0;
    for (const Code code : order) {
        if (code < 0) continue;
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
        if (link < 0) return end;
        const Link& cost = problem.links[link];
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
    link_free.assign(problem.links.size(), 0.0);
}

inline int Messages::deliver(const Problem& problem, Kind kind, int virtual_stage, int micro_batch, double end) {
    const int count = problem.micro_batches;
    const int slot = virtual_stage * count + micro_batch;
    if (kind == kBackwardWeight) return -1;
    if (kind == kForward) {
        if (virtual_stage + 1 == problem.virtual_stages()) {
            gradient[slot] = end;
            return -1;
        }
        activation[slot + count] = send(problem, problem.activation_link[virtual_stage], end);
        return problem.stage_of(virtual_stage + 1);
    }
    if (kind == kBackwardInput) input_end[slot] = end;
    if (virtual_stage == 0) return -1;
    gradient[slot - count] = send(problem, problem.gradient_link[virtual_stage], end);
    return problem.stage_of(virtual_stage - 1);
}

}  // namespace adaptra
