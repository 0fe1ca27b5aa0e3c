// SPDX-License-Identifier: Apache-2.0
// Whole messages in and out of rings: cut into frames on one side, put together, checked and deduplicated on the other.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <tuple>
#include <vector>

#include "memory_pool.hpp"
#include "ring.hpp"
#include "spin.hpp"

namespace adaptra {

// Copy a message into the ring, slot by slot, while the other side already takes the first ones. `header` names and
// describes it; offsets and sizes of the frames are set here: sent again, it is cut into the same frames.
Outcome write_message(Ring& ring, FrameHeader header, const std::byte* source, double deadline_s);

// The same for a part of it, from `offset` on, of about `most` bytes: for a thread that also has other rings to fill. Each
// slot is waited for `patience_s`. `offset` is where to go on; kDone whether or not that is the end.
Outcome write_part(Ring& ring, FrameHeader header, const std::byte* source, std::uint64_t& offset, std::uint64_t most,
                   double patience_s);

// A frame without payload.
Outcome write_control(Ring& ring, FrameKind kind, std::uint64_t sequence, double deadline_s);

// What a receiver is notified of, in order of completion.
struct Event {
    enum class Kind { kMessage, kPart, kRepeated, kAck, kBye };
    Kind kind = Kind::kBye;
    FrameHeader header;           // of a message, or of a part of one; otherwise only `sequence` counts
    std::shared_ptr<Block> block;  // the message's bytes
    double arrived_s = 0.0;        // monotonic clock
    // Where a part is in the ring: it keeps these slots until they are released.
    std::uint64_t first_slot = 0;
    std::uint64_t slots = 0;
};

// The receiving end of one sender's messages. It is kept when rings are replaced: after a new ring has replaced a broken one, the sender
// sends again what was not acknowledged, and what is already here is recognised by its sequence number.
//
// Messages are put together in memory of the inbox. Where that is only on their way to a device, those that were asked
// for before their first frame came are not: their parts are handed out where they lie in the ring, to be released there
// once the device has them. Each part comes once, in no particular order.
class Inbox {
public:
    // `window_nbytes`: a sender begins another message only while less than this of the earlier ones is under way; notes
    // and probes have as much for themselves.
    Inbox(std::uint64_t max_message_nbytes, std::uint64_t pooled_nbytes, std::uint64_t window_nbytes, bool for_device);

    // The message of this key is to be handed out in parts. Those of earlier iterations are not asked for any more.
    void ask(std::int64_t iteration, std::uint8_t direction, std::uint32_t chunk, std::uint32_t micro_batch);

    // Take frames from `ring` until something is complete. No value at the deadline, after a poke (see Ring), once the
    // ring is empty of frames that came again, which are dropped, or, if `outcome` says so, because it is closed and
    // empty. Throws FrameError for a frame that no sender writes.
    // `stays`: the thread comes again, and what arrives meanwhile is left to it, until it comes for another ring or leaves.
    std::optional<Event> next(const std::shared_ptr<Ring>& ring, std::uint64_t seen_pokes, double deadline_s, bool stays,
                              Outcome& outcome);
    void leave();

    // For a thread that waits for several rings: take frames without waiting. Returns whether there is something to deliver:
    // an event, the end of the ring, or (no event) frames that were dropped. Nothing while a thread is in `next`, or stays.
    bool deliver(Ring& ring, std::optional<Event>& event, bool& closed);
    // Whether `deliver` would look into the ring, or find its end.
    bool would_deliver(const Ring& ring);

    std::uint64_t doubles() const { return doubles_.load(); }

private:
    using Key = std::tuple<std::int64_t, std::uint8_t, std::uint32_t, std::uint32_t>;
    struct Partial {
        FrameHeader first;
        std::shared_ptr<Block> block;  // none for a message that is handed out in parts
        std::uint64_t slot_nbytes = 0;
        std::vector<bool> here;  // by slot of the message
        std::size_t missing = 0;
    };

    void attend(const std::shared_ptr<Ring>& ring);
    bool is_attended();
    // Without waiting.
    std::optional<Event> take(Ring& ring, bool& dropped);
    std::optional<Event> accept(Ring& ring, const Slot& slot, const FrameHeader& header, bool& dropped);
    std::optional<Event> accept_data(Ring& ring, const Slot& slot, const FrameHeader& header, bool& dropped);
    Event hand_out(Ring& ring, const Slot& slot, const FrameHeader& header, Partial& part);
    Partial& partial(const FrameHeader& header, std::uint64_t slot_nbytes);
    Partial begin(const FrameHeader& header, std::uint64_t slot_nbytes);
    std::shared_ptr<Block> place_for(const FrameHeader& header);
    void check_window(const FrameHeader& header) const;
    // This frame of a message was not here before.
    void note_frame(const FrameHeader& header, Partial& part);
    void note_if_complete(const Partial& part);
    bool complete(std::uint64_t sequence) const;
    void note_complete(std::uint64_t sequence);

    const std::uint64_t max_message_nbytes_;
    const std::uint64_t window_nbytes_;
    const bool for_device_;
    const std::shared_ptr<MemoryPool> pool_;
    std::mutex taking_;
    std::mutex attending_;
    std::shared_ptr<Ring> attended_;  // what a thread waits for in `next`, or stays at
    Spin spin_;
    std::atomic<bool> small_messages_{false};  // the latest one was
    std::map<std::uint64_t, Partial> partials_;
    // Every sequence number below `all_below_`, and those in the set, are complete.
    std::uint64_t all_below_ = 0;
    std::set<std::uint64_t> complete_beyond_;
    std::atomic<std::uint64_t> doubles_{0};
    std::mutex asking_;
    std::set<Key> asked_;
};

}  // namespace adaptra
