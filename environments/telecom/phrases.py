"""What the scripted user says. ``{}`` takes what the phone showed, or the fact."""

from __future__ import annotations

OPENINGS: dict[str, tuple[str, ...]] = {
    "no_service": (
        "Hi, I cannot make calls any more, my phone finds no network.",
        "My phone has no service.",
        "Hello, I have no signal at all since this morning.",
    ),
    "no_data": (
        "Hi, my mobile internet does not work.",
        "I cannot load anything over mobile data.",
        "The internet on my phone stopped working when I am not on Wi-Fi.",
    ),
    "slow_data": (
        "My mobile internet is terribly slow.",
        "Hi, everything loads so slowly on my phone.",
        "Why is my mobile data so slow? I want it fast again.",
    ),
    "no_mms": (
        "I cannot send picture messages.",
        "Hi, my pictures do not go out as messages.",
        "Sending an MMS with a photo fails every time.",
    ),
    "plan_change": (
        "I want to change to the {plan} plan.",
        "Please move my line to the {plan} plan.",
        "Hi, can I get the {plan} plan?",
    ),
    "refuel": (
        "I need more data this month.",
        "Hi, please add data to my line.",
        "My data runs out, I want to add some.",
    ),
    "bill_question": (
        "Why is my {month} bill so high?",
        "There is something on my {month} bill besides the plan, what is it and how much?",
        "Hi, which extra charge is on my bill of {month}?",
    ),
    "pause": (
        "Please suspend my line for a while.",
        "I want to pause my line.",
        "Hi, I need my line suspended until I ask for it again.",
    ),
    "premium_bar": (
        "Please bar premium numbers on my line.",
        "My son calls premium numbers. Can you block them?",
        "I want premium services barred.",
    ),
    "travel": (
        "I travel to {country} next week and want to use my phone there.",
        "Hi, will my phone work in {country}? I need roaming.",
        "Please get my line ready for {country}.",
    ),
    "refund": (
        "I want my money back for the {charge} on my bill, I never ordered it.",
        "There is a charge for a {charge} on my bill. I want a refund.",
        "Hi, take the {charge} off my bill, I dispute it.",
    ),
}
ANSWERS: dict[str, tuple[str, ...]] = {
    "number": ("My number is {}.", "The number is {}.", "It is {}."),
    "name": ("My name is {}.", "I am {}.", "{}."),
    "born": ("I was born on {}.", "My date of birth is {}.", "Date of birth: {}."),
    "gb": ("I want {} GB.", "{} GB, please.", "Let us say {} GB."),
    "plan": ("The {} plan.", "I want the {} plan.", "{}, please."),
    "month": ("The {} bill.", "{}.", "It is the bill of {}."),
    "charge": ("The {}.", "It says {}.", "I mean the {}."),
    "found": ("Yes, I have my phone back.", "Yes, I found it, it is in my hands.", "Yes, it is back with me."),
}
SAW = ("I see: {}.", "It says: {}.", "I looked: {}.", "My phone says: {}.")
DID = ("Done, {}.", "Okay, {}.", "I did that, {}.", "All right, {}.")
AGREE = ("Yes, please.", "Yes.", "Yes, go ahead.", "Yes, that is fine.")
UNKNOWN = ("I do not know that.", "I cannot tell you that.", "No idea.")
UNCLEAR = (
    "I am not sure what you want me to do.",
    "Sorry, I do not understand. What should I do on my phone?",
    "And what does that mean for me?",
)
STILL_BROKEN = ("No, it is still the same.", "Not yet.", "No, not really.")
TOO_MUCH = "That was a lot at once, I stopped there."
THANKS = ("Thanks, bye.", "All right, thank you.", "Okay, that is all.", "Thank you, goodbye.")
GIVING_UP = ("Never mind, I will try another time.", "This does not help me.", "I give up for today.")
