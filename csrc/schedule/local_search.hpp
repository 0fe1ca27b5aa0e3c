// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "timing.hpp"

namespace adaptra {

// Tabu search over the orders of one schedule. A makespan is a longest path through actions and messages. Only moving
// an action of a critical block (actions of one stage that follow each other on such a path without a gap) before or
// after others of its block can shorten it: the neighbourhoods of van Laarhoven et al. 1992 and of Balas and
// Vazacopoulos 1998 for job shops. Each step takes the move with the best estimate, also if it makes the schedule
// longer, and does not undo it for some steps; when steps stop helping it restarts from the best schedule, shaken.
// Keeps each kind in ascending order per chunk, and the caps.
class LocalSearch {
public:
    LocalSearch(const Problem& problem, const Orders& orders);

    // Steps until `actions` have been simulated or the makespan is at most `target`. Returns whether it improved.
    bool run(std::int64_t actions, double target);

    double makespan() const { return best_makespan_; }
    const Orders& orders() const { return best_; }
    std::int64_t simulated_actions() const { return timing_.simulated_actions(); }

private:
    // Moves what runs as one from `from` on before (or behind) what runs as one from `to` on; those between shift. With
    // equal places, combines a forward and the backward right behind it, or before it (`turned`), or separates them.
    struct Move {
        int stage = -1;
        int from = -1;
        int to = -1;
        bool turned = false;
        double estimate = kNever;
    };
    struct Tabu {
        int stage = -1;
        Code earlier = -1, later = -1;
    };

    void step(const Move& move);
    void shake();
    Move best_move(bool shaking);
    void consider_block(int stage, int first, int last, bool shaking, Move& best);
    void consider_move(const Move& move, bool shaking, Move& best);
    void consider_toggle(int stage, int position, bool shaking, Move& best);
    int low(const Move& move) const { return std::min(move.from, move.to); }
    int high(const Move& move) const;
    void apply(const Move& move, Code* low) const;
    bool may_move(const Move& move) const;
    bool may_swap(Code first, Code second, int stage) const;
    bool keeps_cap(const Move& move) const;
    bool keeps_cap_shifted(const Move& move, double cap) const;
    bool is_tabu(const Move& move) const;
    double estimate(const Move& move, double enough) const;
    double random();

    const Problem* problem_;
    Timing timing_;
    Orders current_, best_;
    std::vector<int> block_;     // of the stage at hand: where what runs as one starts in the critical block
    std::vector<double> level_;  // of the stage at hand: activations held before each position
    double makespan_ = kNever, best_makespan_ = kNever;
    int stalled_ = 0;
    std::vector<Tabu> tabu_;
    std::size_t next_tabu_ = 0;
    std::uint64_t random_ = 88172645463325252ULL;
};

}  // namespace adaptra
