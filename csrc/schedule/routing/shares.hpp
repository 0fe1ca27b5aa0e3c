// SPDX-License-Identifier: Apache-2.0
// Which cell of a stage runs which micro-batch: shares of its work, by what its cells take.
#pragma once

#include "routed.hpp"

namespace adaptra {

// What a cell may be given. Longer than `limit[stage]`, a cell keeps only so many of its own micro-batches, evenly spread
// over the iteration: `phase` 0 keeps the last of each interval, nearly 1 the first; `fewer` keeps less still.
struct ShareRule {
    std::vector<double> limit;  // [stage]: seconds of work of a cell; kNever: only what cannot stay moves
    double phase = 0.0;
    int fewer = 0;
};

// Seconds that a cell takes for a micro-batch of a factor of 1, with the cheaper kind of backward.
double usual_work(const RoutedProblem& problem, int cell);

// How much work a micro-batch is at a stage: 1 for one of a factor of 1.
double weight_of(const RoutedProblem& problem, int stage, Job job);

// Least seconds in which the live cells of a stage can do all its work, whole micro-batches each.
double balanced_work(const RoutedProblem& problem, int stage);

// The micro-batches that a cell does not keep go to the cells with most room in proportion, those before in the stage's
// order first, and stay at the replica that ran them at the stage before where that has room.
Hosts shared(const RoutedProblem& problem, const ShareRule& rule);

// Every micro-batch of a replica with a dead cell runs all its stages at a replica without one; empty if there is none, or
// if stages are pinned.
Hosts without_broken_replicas(const RoutedProblem& problem);

// How many are not at their own replica's cell.
int moved(const RoutedProblem& problem, const Hosts& hosts);

}  // namespace adaptra
