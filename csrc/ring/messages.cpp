// SPDX-License-Identifier: Apache-2.0
#include "messages.hpp"

#include <algorithm>
#include <cstring>

namespace adaptra {
namespace {

// A sender keeps far fewer under way; more means that it is not one of ours.
constexpr std::size_t kMaxPartials = 4096;

// Larger ones take so long to copy that spinning for them saves little, and takes the core from those who copy.
constexpr std::uint64_t kSmallNbytes = 64 << 10;

// How many parts of a message that is handed out may lie in a ring, at least.
constexpr std::uint64_t kPartsOfRing = 4;

}  // namespace

namespace {

Outcome write_frame(Ring& ring, FrameHeader& header, const std::byte* source, double deadline_s) {
    Slot slot;
    const Outcome outcome = ring.claim(slot, deadline_s);
    if (outcome != Outcome::kDone) return outcome;
    header.nbytes = std::min(ring.slot_nbytes(), header.total_nbytes - header.offset);
    *slot.header = header;
    if (header.nbytes != 0) std::memcpy(slot.payload, source + header.offset, header.nbytes);
    ring.commit(slot);
    header.offset += header.nbytes;
    return outcome;
}

}  // namespace

Outcome write_message(Ring& ring, FrameHeader header, const std::byte* source, double deadline_s) {
    header.kind = FrameKind::kData;
    header.offset = 0;
    do {
        const Outcome outcome = write_frame(ring, header, source, deadline_s);
        if (outcome != Outcome::kDone) return outcome;
    } while (header.offset < header.total_nbytes);
    return Outcome::kDone;
}

Outcome write_part(Ring& ring, FrameHeader header, const std::byte* source, std::uint64_t& offset, std::uint64_t most,
                   double patience_s) {
    header.kind = FrameKind::kData;
    header.offset = offset;
    Outcome outcome = Outcome::kDone;
    do {
        outcome = write_frame(ring, header, source, 0.0);
        if (outcome == Outcome::kTimedOut && patience_s > 0.0) {
            outcome = write_frame(ring, header, source, monotonic_s() + patience_s);
        }
    } while (outcome == Outcome::kDone && header.offset < header.total_nbytes && header.offset - offset < most);
    offset = header.offset;
    return outcome;
}

Outcome write_control(Ring& ring, FrameKind kind, std::uint64_t sequence, double deadline_s) {
    Slot slot;
    const Outcome outcome = ring.claim(slot, deadline_s);
    if (outcome != Outcome::kDone) return outcome;
    FrameHeader header;
    header.kind = kind;
    header.sequence = sequence;
    *slot.header = header;
    ring.commit(slot);
    return outcome;
}

Inbox::Inbox(std::uint64_t max_message_nbytes, std::uint64_t pooled_nbytes, std::uint64_t window_nbytes, bool for_device)
    : max_message_nbytes_(max_message_nbytes),
      window_nbytes_(window_nbytes),
      for_device_(for_device),
      pool_(std::make_shared<MemoryPool>(pooled_nbytes, for_device)) {}

void Inbox::ask(std::int64_t iteration, std::uint8_t direction, std::uint32_t chunk, std::uint32_t micro_batch) {
    const std::lock_guard<std::mutex> lock(asking_);
    asked_.erase(asked_.begin(), asked_.lower_bound(Key{iteration, 0, 0, 0}));
    asked_.insert(Key{iteration, direction, chunk, micro_batch});
}

std::optional<Event> Inbox::next(const std::shared_ptr<Ring>& ring, std::uint64_t seen_pokes, double deadline_s,
                                 bool stays, Outcome& outcome) {
    attend(ring);
    const std::unique_ptr<Inbox, void (*)(Inbox*)> leaving(stays ? nullptr : this, [](Inbox* inbox) { inbox->leave(); });
    while (true) {
        bool dropped = false;
        if (std::optional<Event> event = take(*ring, dropped)) return event;
        if (dropped) {
            outcome = Outcome::kDone;
            return std::nullopt;
        }
        if (small_messages_.load()) spin_.until([&] { return ring->changed(seen_pokes); }, deadline_s);
        outcome = ring->await_filled(seen_pokes, deadline_s);
        if (outcome != Outcome::kDone || ring->pokes() != seen_pokes) return std::nullopt;
    }
}

void Inbox::attend(const std::shared_ptr<Ring>& ring) {
    const std::lock_guard<std::mutex> lock(attending_);
    if (attended_ == ring) return;
    if (attended_ != nullptr) attended_->end_urgent();
    attended_ = ring;
    ring->begin_urgent();
}

void Inbox::leave() {
    std::shared_ptr<Ring> left;
    {
        const std::lock_guard<std::mutex> lock(attending_);
        left.swap(attended_);
    }
    if (left != nullptr) left->end_urgent();  // others wake up, and find it unattended
}

bool Inbox::is_attended() {
    const std::lock_guard<std::mutex> lock(attending_);
    return attended_ != nullptr;
}

bool Inbox::deliver(Ring& ring, std::optional<Event>& event, bool& closed) {
    if (is_attended()) return false;
    const bool closes = ring.closed();  // before the last look: what was published before it is still delivered
    bool dropped = false;
    event = take(ring, dropped);
    closed = closes && !event && !dropped;
    return event || dropped || closed;
}

bool Inbox::would_deliver(const Ring& ring) { return !is_attended() && (ring.filled() || ring.closed()); }

std::optional<Event> Inbox::take(Ring& ring, bool& dropped) {
    const std::lock_guard<std::mutex> lock(taking_);
    Slot slot;
    while (ring.take(slot, 0.0) == Outcome::kDone) {
        const FrameHeader header = *slot.header;  // a copy: checked and used are the same bytes
        check_frame(header, ring.slot_nbytes(), max_message_nbytes_);
        std::optional<Event> event = accept(ring, slot, header, dropped);
        if (!event || event->kind != Event::Kind::kPart) ring.release(slot);
        if (event) return event;
    }
    return std::nullopt;
}

std::optional<Event> Inbox::accept(Ring& ring, const Slot& slot, const FrameHeader& header, bool& dropped) {
    switch (header.kind) {
        case FrameKind::kData:
            return accept_data(ring, slot, header, dropped);
        case FrameKind::kAck:
            return Event{Event::Kind::kAck, header, nullptr, monotonic_s()};
        case FrameKind::kBye:
            return Event{Event::Kind::kBye, header, nullptr, monotonic_s()};
        case FrameKind::kVoid:
            break;
    }
    dropped = true;
    return std::nullopt;
}

std::optional<Event> Inbox::accept_data(Ring& ring, const Slot& slot, const FrameHeader& header, bool& dropped) {
    if (complete(header.sequence)) {
        if (header.offset != 0) {
            dropped = true;
            return std::nullopt;
        }
        ++doubles_;
        return Event{Event::Kind::kRepeated, header, nullptr, monotonic_s()};
    }
    Partial& part = partial(header, ring.slot_nbytes());
    if (part.here[header.offset / part.slot_nbytes]) {
        dropped = true;
        return std::nullopt;
    }
    if (part.block == nullptr) return hand_out(ring, slot, header, part);
    if (header.nbytes != 0) std::memcpy(part.block->data() + header.offset, slot.payload, header.nbytes);
    ring.check_released();  // before the frame counts as here: what is not comes again, over another ring
    note_frame(header, part);
    if (part.missing != 0) return std::nullopt;
    Event event{Event::Kind::kMessage, part.first, std::move(part.block), monotonic_s()};
    note_if_complete(part);
    return event;
}

// The frame in `slot`, and those behind it in the ring that continue it, in the message and in memory.
Event Inbox::hand_out(Ring& ring, const Slot& slot, const FrameHeader& header, Partial& part) {
    Event event{Event::Kind::kPart, header, nullptr, monotonic_s(), slot.index, 1};
    note_frame(header, part);
    FrameHeader next;
    const auto continues = [&](const Slot& behind) {
        next = *behind.header;
        return next.kind == FrameKind::kData && same_message(next, header) &&
               next.offset == header.offset + event.header.nbytes && next.offset < header.total_nbytes &&
               !part.here[next.offset / part.slot_nbytes] && behind.payload == slot.payload + event.header.nbytes;
    };
    // Not all of the ring: the device copies one part while the next comes.
    const std::uint64_t most = std::max<std::uint64_t>(1, ring.slots() / kPartsOfRing);
    for (Slot behind; event.slots < most && ring.take_if(behind, continues); ++event.slots) {
        check_frame(next, ring.slot_nbytes(), max_message_nbytes_);
        note_frame(next, part);
        event.header.nbytes += next.nbytes;
    }
    note_if_complete(part);
    return event;
}

void Inbox::note_frame(const FrameHeader& header, Partial& part) {
    part.here[header.offset / part.slot_nbytes] = true;
    --part.missing;
}

void Inbox::note_if_complete(const Partial& part) {
    if (part.missing != 0) return;
    const std::uint64_t sequence = part.first.sequence;
    small_messages_.store(part.first.total_nbytes <= kSmallNbytes);
    partials_.erase(sequence);
    note_complete(sequence);
}

Inbox::Partial& Inbox::partial(const FrameHeader& header, std::uint64_t slot_nbytes) {
    const auto found = partials_.find(header.sequence);
    if (found == partials_.end()) return partials_.emplace(header.sequence, begin(header, slot_nbytes)).first->second;
    if (!same_message(found->second.first, header)) {
        throw FrameError("parts of message " + std::to_string(header.sequence) + " describe different messages");
    }
    if (found->second.slot_nbytes != slot_nbytes) {
        throw FrameError("message " + std::to_string(header.sequence) + " began in slots of " +
                         std::to_string(found->second.slot_nbytes) + " bytes and goes on in slots of " +
                         std::to_string(slot_nbytes));
    }
    return found->second;
}

Inbox::Partial Inbox::begin(const FrameHeader& header, std::uint64_t slot_nbytes) {
    const std::size_t slots = header.total_nbytes == 0 ? 1 : (header.total_nbytes - 1) / slot_nbytes + 1;
    if (slots > 1) check_window(header);
    return {header, place_for(header), slot_nbytes, std::vector<bool>(slots), slots};
}

std::shared_ptr<Block> Inbox::place_for(const FrameHeader& header) {
    if (for_device_ && header.total_nbytes != 0) {
        const std::lock_guard<std::mutex> lock(asking_);
        if (asked_.erase({header.iteration, header.direction, header.chunk, header.micro_batch}) != 0) return nullptr;
    }
    return pool_->get(header.total_nbytes);
}

// Less the largest: it may have begun last, and have come first over a lane that others were slower on.
void Inbox::check_window(const FrameHeader& header) const {
    const bool is_note = header.direction == kLastDirection;
    std::uint64_t nbytes = header.total_nbytes, largest = header.total_nbytes;
    for (const auto& [sequence, part] : partials_) {
        if ((part.first.direction == kLastDirection) != is_note) continue;
        nbytes += part.first.total_nbytes;
        largest = std::max(largest, part.first.total_nbytes);
    }
    if (partials_.size() >= kMaxPartials || nbytes - largest >= window_nbytes_) {
        throw FrameError(std::to_string(partials_.size() + 1) + " messages are under way at once, " +
                         std::to_string(nbytes) + " bytes with message " + std::to_string(header.sequence) +
                         ": more than a window of " + std::to_string(window_nbytes_));
    }
}

bool Inbox::complete(std::uint64_t sequence) const {
    return sequence < all_below_ || complete_beyond_.count(sequence) != 0;
}

void Inbox::note_complete(std::uint64_t sequence) {
    complete_beyond_.insert(sequence);
    while (!complete_beyond_.empty() && *complete_beyond_.begin() == all_below_) {
        complete_beyond_.erase(complete_beyond_.begin());
        ++all_below_;
    }
}

}  // namespace adaptra
