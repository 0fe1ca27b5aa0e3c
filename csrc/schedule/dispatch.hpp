// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "pipeline.hpp"
#include "replay.hpp"

namespace adaptra {

// [stage]: whether backwards are split there, or I and W run in one go.
using Split = std::vector<char>;

// When F and B run as one: never; where both can start at once; also where one of the two is waited for, if both are then
// over sooner; or where both can start at once, and what could start alone lets a W run first, so that the other may come.
enum class Pairing { kNever, kAtOnce, kForeseen, kPatient };

// How a dispatcher decides. The default is what `simulate_online` does: B > F > W, never idle by choice. The executor's
// own rule is another, the plan first: engine/online_order.py.
struct Policy {
    Split split;
    const Urgency* urgency = nullptr;
    // Makespan to reach: with urgencies that are remaining times, what is more urgent is waited for if it would be late
    // otherwise, and by more than what waiting delays.
    double target = kNever;
    // Waits also for messages that are this many actions from being sent, expected as if each ran at once.
    int horizon = 0;
    std::vector<double> cap;        // per stage, never above the problem's
    std::vector<double> released;   // per stage, at most the problem's: less keeps room by running W earlier
    Pairing pairing = Pairing::kNever;
    bool paced = false;             // actions wait until the rendezvous link that their message takes will be free
    int group = 1;                  // micro-batches per chunk in the reference order of interleaved schedules
};

// Runs, at each step, the first action that is ready and within the cap, stage by stage in order of time.
//
// Why a cap cannot deadlock it. All stages share one reference order of forwards, F_0 F_1 ..., Megatron's
// interleaved one with `group` micro-batches, and F_k may start only if a stage that held all of F_0..F_max(k, k')
// (k' the highest started so far), less what its backwards gave back, would keep the cap. So forwards that were
// skipped always keep their room, and F_k starts only within it. Let m be the first micro-batch of which some backward
// never runs, and B_m the one of its latest such virtual stage. The forwards of m have an index <= D(m), its index in
// the last chunk; the backwards of the micro-batches before it, m of each chunk, ran everywhere, and their weight
// gradients, which no action waits for, run when the cap blocks. A stage thus needs room for D(m) + 1 - m * chunks
// activations at most: with that much (`room_needed`), every forward of m can start, one virtual stage after the other,
// and so can B_m. It does not matter on which stages virtual stages are.
// Where an input gradient adds activations, B_m needs room for what it adds (`room_needed`). F_k leaves it: with all
// weight gradients over, the next I would keep the cap. That costs nothing, for no schedule can do without it: an I has
// to follow F_k, and what runs between them makes no more room than those weight gradients.
class Dispatcher {
public:
    explicit Dispatcher(const Problem& problem) : problem_(problem) {}

    // Returns the makespan, or kNever if some stage's cap is below `room_needed`.
    double run(const Policy& policy);

    const Orders& orders() const { return orders_; }
    std::vector<std::vector<double>>& start() { return start_; }
    std::vector<std::vector<double>>& end() { return end_; }

private:
    struct Stage {
        double free = 0.0;
        int forwards = 0;
        int inputs = 0;
        int weights = 0;
        double work = 0.0;  // seconds of actions that have not started
        int highest = -1;  // highest index in the reference order of a forward started here
    };
    static constexpr Code kAlone = -1;
    struct Choice {
        double time = kNever;  // earliest start
        Code code = 0;
        double urgency = 0.0;
        Code behind = kAlone;  // the backward that a forward is combined with
    };

    void reset();
    Choice choose(int stage) const;
    Choice next_backward(int stage) const;
    Choice next_forward(int stage) const;
    Choice next_weight(int stage) const;
    Choice combined(int stage, const Choice& backward, const Choice& forward) const;
    Choice wait_for_urgent(int stage, const Choice& chosen, const Choice* candidates) const;
    Choice expected_message(int stage, Kind kind) const;
    void expect(Kind kind, int virtual_stage, int micro_batch);
    double urgency(Kind kind, int slot) const;
    bool forward_fits(int stage, int index) const;
    bool input_fits(int stage, int forwards) const;
    double link_ready(Kind kind, int virtual_stage, int micro_batch) const;
    Kind backward_kind(int stage) const { return policy_.split[stage] ? kBackwardInput : kBackward; }
    double seconds(int stage, const Choice& choice) const;
    void start_action(int stage, const Choice& choice);
    int book(int stage, Code code, double start, double end, double sent);
    void update(int stage);

    const Problem& problem_;
    Policy policy_;
    Messages messages_;
    std::vector<double> expected_activation_, expected_gradient_;  // as in Messages, while these do not know
    std::vector<Stage> state_;
    std::vector<int> next_forward_;   // [virtual stage]
    std::vector<int> next_backward_;  // [virtual stage]
    std::vector<Choice> choice_;
    std::vector<int> winner_;  // tournament over stages by (time, stage); leaves start at `leaves_`
    int leaves_ = 1;
    Orders orders_;
    std::vector<std::vector<double>> start_;
    std::vector<std::vector<double>> end_;
    std::vector<Order> weight_queue_;  // [stage]: in the order in which the input gradients ran
};

// Index of the forward of (chunk, micro-batch) in Megatron's interleaved order with groups of `group`.
int reference_index(const Problem& problem, int group, int chunk, int micro_batch);

// Activations that `stage` must be able to hold so that groups of `group` cannot deadlock.
double room_needed(const Problem& problem, int group, int stage, bool split);

// The largest group, up to one per stage, that the caps have room for; 0 if not even 1 fits.
int largest_group(const Problem& problem, const Split& split);

// How many a schedule has.
std::int64_t actions_of(const Problem& problem, const Split& split);

// Where backwards can be split: wherever the cap has room for what an input gradient adds.
Split most_split(const Problem& problem);

}  // namespace adaptra
