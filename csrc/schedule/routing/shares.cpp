// SPDX-License-Identifier: Apache-2.0
#include "shares.hpp"

#include <algorithm>
#include <cmath>
#include <queue>

namespace adaptra {
namespace {

constexpr double kTolerance = 1e-9;
constexpr int kBisections = 60;

double live_work(const RoutedProblem& problem, int replica, int stage) {
    return usual_work(problem, problem.cell(replica, stage));
}

// The micro-batches of `replica` that its cell does not keep, marked in `leaves`. Returns the work that stays.
double keep(const RoutedProblem& problem, const ShareRule& rule, int stage, int replica, std::vector<char>& leaves) {
    const int count = problem.micro_batches, first = replica * count;
    const double work = live_work(problem, replica, stage);
    double total = 0.0;
    for (Job job = first; job < first + count; ++job) total += weight_of(problem, stage, job);
    const bool live = problem.live[problem.cell(replica, stage)];
    if (live && total * work <= rule.limit[stage] * (1.0 + kTolerance)) return total * work;
    double room = !live ? 0.0 : work > 0.0 ? rule.limit[stage] / work : total;
    if (problem.factor.empty()) room = std::floor(room + kTolerance);
    room = std::max(0.0, room - rule.fewer * total / count);
    double kept = 0.0, passed = 0.0;
    for (Job job = first; job < first + count; ++job) {
        const double weight = weight_of(problem, stage, job);
        passed += weight;
        const bool due = kept + weight <= room / total * passed + rule.phase * weight + kTolerance;
        const bool stays = room > 0.0 && due && kept + weight <= room + kTolerance;
        leaves[job] = !stays;
        kept += stays ? weight : 0.0;
    }
    return kept * work;
}

// What is to be shared, the longest first and else by number.
std::vector<Job> leaving(const RoutedProblem& problem, int stage, const std::vector<char>& leaves) {
    std::vector<Job> jobs;
    for (int number = 0; number < problem.micro_batches; ++number) {
        for (int replica = 0; replica < problem.replicas; ++replica) {
            const Job job = replica * problem.micro_batches + number;
            if (leaves[job]) jobs.push_back(job);
        }
    }
    if (!problem.factor.empty()) {
        std::stable_sort(jobs.begin(), jobs.end(), [&](Job one, Job other) {
            return weight_of(problem, stage, one) > weight_of(problem, stage, other);
        });
    }
    return jobs;
}

void share_stage(const RoutedProblem& problem, const ShareRule& rule, int stage, Hosts& hosts) {
    const int replicas = problem.replicas;
    std::vector<char> leaves(problem.jobs(), 0);
    std::vector<double> load(replicas), given(replicas, 0.0), room(replicas);
    for (Job job = 0; job < problem.jobs(); ++job) hosts[problem.slot(stage, job)] = problem.owner(job);
    if (problem.pinned[stage]) return;
    for (int replica = 0; replica < replicas; ++replica) load[replica] = keep(problem, rule, stage, replica, leaves);
    const double balanced = balanced_work(problem, stage);
    using Receiver = std::pair<double, int>;  // share of its room that is taken, replica
    std::priority_queue<Receiver, std::vector<Receiver>, std::greater<Receiver>> receivers;
    // Where micro-batches differ, the longest go first, each to the cell that has least to do: what is even in time matters less.
    const bool varied = !problem.factor.empty();
    const auto filled = [&](int replica) {
        if (varied) return load[replica] + given[replica];
        const double next = given[replica] + live_work(problem, replica, stage);
        return room[replica] > 0.0 ? next / room[replica] : replicas + load[replica] + next;
    };
    for (int replica = 0; replica < replicas; ++replica) {
        room[replica] = std::max(0.0, balanced * (1.0 + kTolerance) - load[replica]);
        if (problem.live[problem.cell(replica, stage)]) receivers.emplace(filled(replica), replica);
    }
    for (const Job job : leaving(problem, stage, leaves)) {
        const int replica = problem.owner(job);
        const double weight = weight_of(problem, stage, job);
        const int before = stage > 0 ? hosts[problem.slot(stage - 1, job)] : replica;
        const bool can = before != replica && problem.live[problem.cell(before, stage)] &&
                         given[before] + weight * live_work(problem, before, stage) <= room[before];
        // Entries are out of date where a replica was given work past the queue: put back with what is true.
        while (!can && receivers.top().first < filled(receivers.top().second) - kTolerance) {
            const int stale = receivers.top().second;
            receivers.pop();
            receivers.emplace(filled(stale), stale);
        }
        const int host = can ? before : receivers.top().second;
        hosts[problem.slot(stage, job)] = host;
        given[host] += weight * live_work(problem, host, stage);
        if (!can) {
            receivers.pop();
            receivers.emplace(filled(host), host);
        }
    }
}

}  // namespace

double usual_work(const RoutedProblem& problem, int cell) {
    const double* seconds = &problem.per_cell[static_cast<std::size_t>(cell) * 4];
    const double split = seconds[kBackwardInput] + seconds[kBackwardWeight];
    return seconds[kForward] + (problem.whole_given ? std::min(split, seconds[kBackward]) : split);
}

double weight_of(const RoutedProblem& problem, int stage, Job job) {
    if (problem.factor.empty()) return 1.0;
    // A kind counts by what it takes of the stage's time at the job's own replica.
    const double* seconds = &problem.per_cell[static_cast<std::size_t>(problem.cell(problem.owner(job), stage)) * 4];
    double weighted = 0.0, total = 0.0;
    for (const Kind kind : {kForward, kBackwardInput, kBackwardWeight}) {
        weighted += seconds[kind] * problem.factor_of(kind, stage, job);
        total += seconds[kind];
    }
    return total > 0.0 ? weighted / total : 1.0;
}

double balanced_work(const RoutedProblem& problem, int stage) {
    double total = 0.0, slowest = 0.0;
    for (Job job = 0; job < problem.jobs(); ++job) total += weight_of(problem, stage, job);
    std::vector<double> work;
    for (int replica = 0; replica < problem.replicas; ++replica) {
        if (!problem.live[problem.cell(replica, stage)]) continue;
        work.push_back(live_work(problem, replica, stage));
        slowest = std::max(slowest, work.back());
    }
    const auto done_within = [&](double seconds) {
        double done = 0.0;
        for (const double each : work) {
            const double share = each > 0.0 ? seconds / each : total;
            done += std::min(total, problem.factor.empty() ? std::floor(share + kTolerance) : share);
        }
        return done >= total - kTolerance;
    };
    double low = 0.0, high = slowest * total;
    for (int step = 0; step < kBisections; ++step) (done_within((low + high) / 2) ? high : low) = (low + high) / 2;
    return high;
}

Hosts shared(const RoutedProblem& problem, const ShareRule& rule) {
    Hosts hosts(problem.slots());
    for (int stage = 0; stage < problem.stages; ++stage) share_stage(problem, rule, stage, hosts);
    return hosts;
}

Hosts without_broken_replicas(const RoutedProblem& problem) {
    std::vector<int> whole;
    std::vector<char> is_whole(problem.replicas, 1);
    for (int cell = 0; cell < problem.cells(); ++cell) is_whole[problem.replica_of(cell)] &= problem.live[cell];
    for (int replica = 0; replica < problem.replicas; ++replica) {
        if (is_whole[replica]) whole.push_back(replica);
    }
    Hosts hosts;
    const bool pinned = std::count(problem.pinned.begin(), problem.pinned.end(), 1) > 0;
    if (whole.empty() || pinned) return hosts;
    std::vector<int> host(problem.jobs());
    std::size_t next = 0;
    for (int number = 0; number < problem.micro_batches; ++number) {
        for (int replica = 0; replica < problem.replicas; ++replica) {
            const bool stays = is_whole[replica];
            host[replica * problem.micro_batches + number] = stays ? replica : whole[next++ % whole.size()];
        }
    }
    for (int stage = 0; stage < problem.stages; ++stage) hosts.insert(hosts.end(), host.begin(), host.end());
    return hosts;
}

int moved(const RoutedProblem& problem, const Hosts& hosts) {
    int count = 0;
    for (std::size_t slot = 0; slot < hosts.size(); ++slot) {
        count += hosts[slot] != problem.owner(static_cast<Job>(slot % problem.jobs()));
    }
    return count;
}

}  // namespace adaptra
